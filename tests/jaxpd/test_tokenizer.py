"""Tokenizers from both kinds of files, decoding by bytes, chat templates, and the reference ids of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxpd.checkpoints import Checkpoint, resolve
from jaxpd.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jaxpd.errors import InvalidArgument, Unavailable
from jaxpd.progress import SilentProgress
from jaxpd.tokenizer import Tokenizer, byte_alphabet, load_tokenizer

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
USER = {"role": "user", "content": "hi"}


def fetched(name: str) -> Checkpoint:
    """A built-in model, downloaded once per machine."""
    try:
        return resolve(name, progress=SilentProgress())
    except Unavailable as error:
        pytest.skip(f"{name} is not in the cache and cannot be fetched: {error}")


@pytest.mark.parametrize("name", [pytest.param("smollm2-135m"), pytest.param("gemma3-270m", marks=pytest.mark.gemma)])
def test_real_models_give_the_reference_ids_and_text(name: str) -> None:
    tokenizer = fetched(name).tokenizer()
    prompts = json.loads((REFERENCE / f"{name}.json").read_text())["prompts"]
    assert len(prompts) >= 6
    for prompt in prompts:
        ids = tokenizer.encode(prompt["text"], add_special_tokens=prompt["add_special_tokens"])
        assert ids == prompt["prompt_ids"], prompt["label"]
        assert tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=False) == prompt["greedy_text"]


def test_the_default_models_chat_template_and_odd_text() -> None:
    tokenizer = fetched("smollm2-135m").tokenizer()
    assert tokenizer.render_chat([USER]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template([USER])
    assert ids[0] == 1 and ids.count(1) == 3 and 2 in ids
    assert tokenizer.eos_token_ids == (2,) and tokenizer.vocab_size == 49152
    for text in ("a  1  22\t\n\n 3", "é\u0301 \U0001f468\u200d\U0001f469 \u4f60\u597d\r\n", "don't 'LL  x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- tokenizers written here ----


def byte_level(**options: Any) -> Tokenizer:
    """Ids 0 to 255 are the bytes, 256 is "ab", then special tokens and an added word with an accent."""
    vocab = dict(byte_alphabet())
    vocab["ab"] = 256
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<t\u00f6ol>"])
    return Tokenizer(backend, **options)


PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "\u2581",
    "a",
    "b",
    "ab",
    "\u2581ab",
    "ba",
    "<b>",
]


def sentencepiece(**metadata: Any) -> Tokenizer:
    """A Llama-like vocabulary with byte fallback: ids 3 to 258 are the bytes, 259 is the space."""
    types = [2, 3, 3, *[6] * 256, *[1] * 6, 4]
    scores = [0.0] * 262 + [-1.0, -2.0, -3.0, 0.0]
    base = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": np.array(types),
        "tokenizer.ggml.scores": np.array(scores),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return tokenizer_from_gguf(base | {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, where="it")


def test_sentencepiece_from_gguf() -> None:
    plain = sentencepiece(add_space_prefix=False)
    assert plain.encode("ab ab<b>a") == [1, 262, 263, 265, 260]  # BOS first
    assert plain.encode("aba", add_special_tokens=False) == [262, 260]  # "ab" has the better score than "ba"
    assert plain.encode("é", add_special_tokens=False) == [3 + 0xC3, 3 + 0xA9]  # byte fallback
    assert plain.encode("ab", add_special_tokens=False) == [262]
    assert plain.decode([263, 262]) == " abab"
    prefixed = sentencepiece()
    assert prefixed.encode("ab") == [1, 263]
    assert prefixed.decode([1, 263, 263]) == "ab ab"
    assert sentencepiece(add_bos_token=False, add_eos_token=True, add_space_prefix=False).encode("a") == [260, 2]


def test_byte_fallback_spoils_only_the_broken_byte() -> None:
    ni = [3 + byte for byte in "你".encode()]
    tokenizer = sentencepiece(add_space_prefix=False)
    assert tokenizer.decode([*ni, 3 + 0xE4, 260]) == "你\ufffda"
    assert tokenizer.decode([*ni, *ni]) == "你你"
    # The package replaces the good character as well; if it no longer does, our own decoding can be reconsidered.
    assert tokenizer.backend.decode([*ni, 3 + 0xE4]) != "你\ufffd"


def test_llama3_qwen2_and_gpt2_split_digits_and_words_differently() -> None:
    by_byte = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    tokens = [*by_byte, "12", "123", "1234", "'s", "<s>"]

    def encode(pre: str, text: str) -> list[str]:
        tokenizer = tokenizer_from_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": np.array([1] * 260 + [3]),
                "tokenizer.ggml.merges": ["1 2", "12 3", "123 4", "' s"],
                "tokenizer.ggml.bos_token_id": 260,
            },
            where="it",
        )
        assert tokenizer.decode(tokenizer.encode(text)) == text
        return [tokens[i] for i in tokenizer.encode(text)]

    assert encode("gpt-2", "1234") == ["1234"]
    assert encode("smollm", "1234") == ["1", "2", "3", "4"]
    assert encode("qwen2", "1234") == ["1", "2", "3", "4"]
    assert encode("llama-bpe", "1234") == ["<s>", "123", "4"]
    assert encode("llama-bpe", "A's") == ["<s>", "A", "'s"]


def test_decoding_of_added_special_and_unknown_ids() -> None:
    tokenizer = byte_level()
    assert tokenizer.encode("ab<t\u00f6ol></s>") == [256, 259, 258]
    assert tokenizer.decode([256, 259, 258]) == "ab<t\u00f6ol>"
    assert tokenizer.decode([256, 259, 258], skip_special_tokens=False) == "ab<t\u00f6ol></s>"
    assert tokenizer.decode([97, 100_000, -1, 98]) == "ab"
    assert tokenizer.decode(list("é€😀".encode())) == "é€😀"
    assert tokenizer.decode(list("€".encode())[:2]) == "\ufffd"
    assert tokenizer.vocab_size == 260


def test_saved_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.backend.enable_truncation(max_length=4)
    tokenizer.backend.enable_padding(length=8)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("x" * 50)) == 50
    assert load_tokenizer(tmp_path).encode("x") == [120]


def test_files_of_a_folder(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    config["chat_template"] = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ bos_token }}d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path, eos_token_ids=(258, 7))
    assert loaded.encode("a") == [257, 97]
    assert loaded.eos_token_ids == (258, 7)
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert loaded.apply_chat_template([USER]) == [257, 100]  # BOS once: the template's
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}j")
    assert load_tokenizer(tmp_path).render_chat([USER]) == "</s>j"
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(InvalidArgument, match=r"tokenizer_config\.json is corrupt"):
        load_tokenizer(tmp_path)


def test_a_decoder_that_is_no_map_of_bytes_is_named() -> None:
    backend = byte_level().backend
    backend.decoder = decoders.WordPiece()
    with pytest.raises(InvalidArgument, match="unsupported tokenizer decoder WordPiece"):
        Tokenizer(backend)


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_metaspace(scheme: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"\u2581": 0, "a": 1}, []))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    assert Tokenizer(backend).decode([0, 1, 0, 1]) == ("a a" if scheme == "always" else " a a")


def render(template: str, messages: Any = (USER,), **options: Any) -> str:
    return byte_level(chat_template=template, special_tokens={"bos_token": "<s>"}).render_chat(messages, **options)


def test_what_templates_expect() -> None:
    assert render("{{ bos_token }}{{ messages | tojson }}") == '<s>[{"role": "user", "content": "hi"}]'
    assert render("{{ {'a': '<é>'} | tojson(indent=1) }}") == '{\n "a": "<é>"\n}'  # not escaped for HTML
    assert render("{% if add_generation_prompt %}go{% endif %}", add_generation_prompt=False) == ""
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert (
        render("{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{{ m.content }}{% endfor %}") == "hi"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{% if true %}\n  {% if tools is none %}\nx\n  {% endif %}\n{% endif %}") == "x\n"  # trimmed blocks
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ 'u: ' + messages[0]['content'] }}", parts) == "u: ab"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", [USER], "roles must alternate"),
        ("{% if %}", [USER], "does not compile"),
        ("{{ messages[3].content + 'x' }}", [USER], "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}{{ [].append(1) }}", [USER], "refuses the messages"),
        ("x", ["hi"], "message 0 is str"),
        ("x", [USER, {"content": "hi"}], "message 1 has no role"),
        ("x", [{"role": "user"}], "message 0 needs a content"),
        ("x", [{"role": "user", "content": 3}], "needs a content that is text, not 3"),
        ("x", [{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
    ],
)
def test_bad_templates_and_messages_are_clear_errors(template: str, messages: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        render(template, messages)
    assert caught.value.field == "chat"
