"""One engine in one process, told what to measure line by line; started by `versus_cpu_engines.py`.

    python worker.py with_jaxpd '{"threads": 2, ...}'

Each line of stdin is one JSON object such as {"do": "decode", "prompt": [1, 2], "tokens": 64}, each answered by one
line of JSON on stdout. The first line out says that the engine is ready. Whatever the engine itself prints goes to
stderr. A worker that was told nothing sleeps in a read, so that others can be measured meanwhile.

An engine is a module beside this file with a class `Engine(options)` and three methods. This file knows nothing of
jaxpd, since peers run in an interpreter of their own:

    prefill(prompt) -> {"seconds"}                      a prompt's KV and its first token
    decode(prompt, tokens) -> {"seconds", "steps", ...} first token to last token, which are `steps` = tokens - 1 steps
    batch(prompts, tokens) -> {"seconds", "tokens"}     all prompts at once, until the last answer is complete; `tokens`
                                                        counts the tokens generated for all of them
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import resource
import sys
import time
from typing import Any


def peak_bytes() -> int:
    """The most memory this process ever held (resident set, high-water mark)."""
    status = pathlib.Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8")) if status.exists() else None
    if found:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def pin(threads: int) -> None:
    """Keeps this process on `threads` cores, which also bounds libraries that make a thread for each core they see."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def main() -> None:
    """Serves one engine until stdin ends."""
    name, options = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native code prints to descriptor 1 too
    pin(options["threads"])

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    start = time.perf_counter()
    engine = importlib.import_module(name).Engine(options)
    answer({"ready_s": time.perf_counter() - start, "peak_bytes": peak_bytes(), **engine.about()})
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        used = time.process_time()
        result = {} if do == "memory" else getattr(engine, do)(**command)
        answer({**result, "cpu_s": time.process_time() - used, "peak_bytes": peak_bytes()})
    answers.close()
    engine.close()


if __name__ == "__main__":
    main()
