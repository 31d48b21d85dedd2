// How the page talks to the server: the key, errors in words, and server-sent events read from a fetch, since an
// EventSource cannot send a header.

const KEY = "jaxpd-key";

/** The API key of this tab; empty when there is none. */
export function getKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** What the server, or the way to it, answered instead of what was asked for. `message` is for people. */
export class ServerError extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** A response that is fine, or a ServerError. An abort goes through as it is. */
export async function ask(path, { body, signal, headers: more = {} } = {}) {
  const headers = { ...more };
  if (getKey()) headers.authorization = `Bearer ${getKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  let message = null;
  try {
    message = wordsOf((await response.json()).error);
  } catch {
    message = null; // not JSON: a proxy, perhaps
  }
  throw new ServerError(message ?? `The server answered ${response.status} and did not say why.`, {
    status: response.status,
    retryAfter,
  });
}

/** The message of an error object as OpenAI shapes it; null where there is none. */
export function wordsOf(error) {
  if (typeof error === "string") return error;
  return typeof error?.message === "string" ? error.message : null;
}

/** The data of each server-sent event of a response. Comments are passed over; `alive` is called for them too. */
export async function* events(response, alive = () => {}) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection to the server was lost.");
      }
      if (chunk.done) return;
      alive();
      rest += decoder.decode(chunk.value, { stream: true });
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it has ended already, or was aborted
  }
}

/** A request id of 64 random bits, so that the page knows its own request from the start. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The name that /live gives to a request; null where the browser has no cryptography (plain HTTP from afar). */
export async function opaque(requestId) {
  if (!globalThis.crypto?.subtle) return null;
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(requestId));
  return Array.from(new Uint8Array(digest).slice(0, 4), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** An element with a class and text. */
export function make(tag, className = "", text = null) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== null) element.textContent = text;
  return element;
}

/** Seconds for people: 0.42 ms, 34 ms, 1.24 s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = seconds * 1000;
  if (ms < 10) return `${ms.toFixed(ms < 1 ? 2 : 1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}
