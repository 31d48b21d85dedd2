"""The tokenizer in a GGUF file's metadata, built for the `tokenizers` package.

GGUF stores the vocabulary, the type of each token (3 control, 4 user-defined, 6 byte) and either merges (byte-level
BPE, model `gpt2`, whose pre-tokenizer is only named) or scores (SentencePiece, model `llama`), from which merges are
derived.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxpd.checkpoints.gguf import eos_token_ids
from jaxpd.errors import InvalidArgument, JaxpdError, NotFound
from jaxpd.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"  # SentencePiece's stand-in for a space

# Pre-tokenizer regexes of the models, as their own tokenizer.json has them. They differ in how digits are grouped.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _WORDS % r"\p{N}"
_LLAMA3 = _WORDS % r"\p{N}{1,3}"


def tokenizer_from_gguf(metadata: dict[str, Any], *, where: str) -> Tokenizer:
    """The tokenizer described by `metadata`; `where` names the file in errors.

    Raises NotFound when there is none, InvalidArgument naming a model or pre-tokenizer that is not supported.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise NotFound(f"{where} holds no tokenizer, so the model takes and gives token ids only")
    try:
        return _build(metadata, tokens, where)
    except JaxpdError:
        raise
    except Exception as error:  # the `tokenizers` package raises plain Exception on merges that do not fit
        raise InvalidArgument(f"{where} holds a tokenizer that makes no sense: {error}; fetch it again") from error


def _build(metadata: dict[str, Any], tokens: list[str], where: str) -> Tokenizer:
    types = metadata.get("tokenizer.ggml.token_type")
    types = np.ones(len(tokens), np.int32) if types is None else np.asarray(types)
    if len(types) != len(tokens):
        raise InvalidArgument(f"{where} is corrupt: {len(types)} token types for {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, vocab, where)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens, vocab, types, where), True
    else:
        raise InvalidArgument(f"{where}: unsupported tokenizer model {kind!r}; supported are gpt2 and llama")

    def added(which: tuple[int, ...], *, special: bool) -> list[tokenizers.AddedToken]:
        ids = np.flatnonzero(np.isin(types, which))
        return [tokenizers.AddedToken(tokens[i], normalized=False, special=special) for i in ids]

    backend.add_special_tokens(added((_UNKNOWN, _CONTROL), special=True))
    backend.add_tokens(added((_USER_DEFINED,), special=False))
    special: dict[str, str] = {}
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            special[role] = tokens[token_id]
    _add_template(backend, metadata, special, adds_bos)
    template = metadata.get("tokenizer.chat_template")
    named = {
        name: source
        for name in metadata.get("tokenizer.chat_templates", ())
        if (source := metadata.get(f"tokenizer.chat_template.{name}")) is not None
    }
    return Tokenizer(
        backend,
        chat_template=template,
        named_templates=named,
        special_tokens=special,
        eos_token_ids=eos_token_ids(metadata),
    )


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int], where: str) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE and whether its family adds BOS by default."""
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise InvalidArgument(f"{where}: its metadata lacks tokenizer.ggml.merges; convert the model again")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    pre = metadata.get("tokenizer.ggml.pre")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    normalizer, ignore_merges, adds_bos = None, False, False
    if pre == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in ("qwen2", "deepseek-r1-qwen"):
        split = [pre_tokenizers.Split(tokenizers.Regex(_QWEN2), "isolated"), byte_level]
        normalizer = normalizers.NFC()
    elif pre in ("llama-bpe", "llama3", "llama-v3"):
        split = [pre_tokenizers.Split(tokenizers.Regex(_LLAMA3), "isolated"), byte_level]
        ignore_merges = adds_bos = True
    elif pre == "gpt-2":
        split = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        raise InvalidArgument(
            f"{where}: unsupported pre-tokenizer {pre!r}; supported are smollm, qwen2, llama-bpe and gpt-2 "
            "(token ids as prompts work without it)"
        )
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(split)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend, adds_bos


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], vocab: dict[str, int], types: np.ndarray, where: str
) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise InvalidArgument(f"{where}: its metadata lacks tokenizer.ggml.scores; convert the model again")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab, _merges(tokens, vocab, types, scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
        )
    )
    to_space = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        backend.decoder = decoders.Sequence([*to_space, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.decoder = decoders.Sequence(to_space)
    return backend


def _merges(tokens: list[str], vocab: dict[str, int], types: np.ndarray, scores: np.ndarray) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the token with the best score first (ties: the lowest id)."""
    normal = np.flatnonzero(types == 1)
    order = normal[np.argsort(-np.asarray(scores)[normal], kind="stable")]
    merges: list[tuple[str, str]] = []
    for token in (tokens[i] for i in order):
        pairs = [
            (token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in vocab and token[cut:] in vocab
        ]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += pairs
    return merges


def _add_template(
    backend: tokenizers.Tokenizer, metadata: dict[str, Any], special: dict[str, str], adds_bos: bool
) -> None:
    """BOS before and EOS behind a prompt, where the metadata (or, silent, the tokenizer's family) says so."""
    bos = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return
    single = " ".join(part for part in (bos, "$A", eos) if part is not None)
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
