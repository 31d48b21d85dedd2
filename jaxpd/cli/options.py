"""The options that several commands share, and how their text becomes numbers and an `EngineConfig`."""

from __future__ import annotations

import pathlib
import re
from typing import Annotated, Any

import typer

from jaxpd.config import DTYPES, KERNELS, MODES, EngineConfig
from jaxpd.errors import InvalidArgument
from meshes.spec import parse_mesh_specs

DEFAULT_MODEL = "smollm2-135m"

MESHES = "Meshes"
LIMITS = "Limits"
NUMERICS = "Numerics and compiling"

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str, *, flag: str = "--kv-memory") -> int:
    """Bytes from "512MiB", "2GiB", "1.5GB" or a plain number of bytes. Raises InvalidArgument naming `flag`."""
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise InvalidArgument(
            f"{flag} {text} is not a size; write bytes or a number with KiB, MiB, GiB or TiB, such as 512MiB",
            field=flag.lstrip("-").replace("-", "_"),
        )
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse_token_ids(text: str, *, flag: str = "--prompt-ids") -> tuple[int, ...]:
    """Token ids from "1,2,3". Raises InvalidArgument naming `flag` and the piece that is no number."""
    ids = []
    for piece in text.split(","):
        try:
            ids.append(int(piece))
        except ValueError:
            raise InvalidArgument(
                f"{flag}: {piece.strip()!r} is not a token id; write numbers with commas, such as 1,2,3",
                field=flag.lstrip("-").replace("-", "_"),
            ) from None
    return tuple(ids)


def parse_logit_bias(text: str, *, flag: str = "--logit-bias") -> dict[int, float]:
    """Token id -> bias from "50:-100,7:2.5". Raises InvalidArgument naming `flag` and the piece that is no pair."""
    biases: dict[int, float] = {}
    for piece in text.split(","):
        token, _, bias = piece.partition(":")
        try:
            pair = int(token), float(bias)
        except ValueError:
            raise InvalidArgument(
                f"{flag}: {piece.strip()!r} is not ID:BIAS; write pairs with commas, such as 50:-100,7:2.5",
                field="logit_bias",
            ) from None
        if pair[0] in biases:
            raise InvalidArgument(f"{flag} names token {pair[0]} twice; give one bias for it", field="logit_bias")
        biases[pair[0]] = pair[1]
    return biases


def parse_address(text: str, *, flag: str = "--server") -> str:
    """ "host:port", checked; an IPv6 host stands in brackets. Raises InvalidArgument naming `flag`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise InvalidArgument(f"{flag} {text} must be HOST:PORT, such as 127.0.0.1:50051", field=flag.lstrip("-"))
    return text


def engine_fields(*, kv_memory: str | None, **fields: Any) -> dict[str, Any]:
    """The fields of `EngineConfig` that were given, checked as far as they can be before a model is fetched for them.

    Raises InvalidArgument for a size, a mesh spec or a value that is out of range.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if kv_memory is not None:
        given["kv_memory"] = parse_size(kv_memory)
    EngineConfig(**given)
    for field in ("mesh", "prefill_mesh", "decode_mesh"):
        _check_mesh(field, given.get(field))
    return given


def flag_of(field: str) -> str:
    """The flag that sets a field of `EngineConfig`: `step_timeout_s` is --step-timeout."""
    return f"--{field.removesuffix('_s').replace('_', '-')}"


def _check_mesh(field: str, text: str | None) -> None:
    if text is not None:
        try:
            parse_mesh_specs(text, name=flag_of(field))
        except ValueError as error:
            raise InvalidArgument(str(error), field=field) from None


_MODEL_HELP = "A built-in name, the path of a checkpoint folder or GGUF file, or a Hugging Face hub id."
Model = Annotated[str, typer.Argument(help=_MODEL_HELP)]
OptionalModel = Annotated[str | None, typer.Argument(help=_MODEL_HELP, show_default=DEFAULT_MODEL)]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(MODES),
        help="How prefill and decode share hardware: on meshes of their own, or on one mesh as separate programs, in "
        "one hybrid batch, or prompts first.",
        show_default="disaggregated; chunked on a single accelerator",
        rich_help_panel=MESHES,
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="TPxDP",
        help="The one mesh of the modes that share it.",
        show_default="1x1 on CPU, else all devices",
        rich_help_panel=MESHES,
    ),
]
PrefillMesh = Annotated[
    str | None,
    typer.Option(
        metavar="TPxDP",
        help="Mesh that prompts are prefilled on: 8x1 is 8-way tensor parallel by 1 data replica.",
        show_default="1x1 on CPU, else derived from the devices",
        rich_help_panel=MESHES,
    ),
]
DecodeMesh = Annotated[
    str | None,
    typer.Option(
        metavar="TPxDP",
        help="Mesh that tokens are decoded on; its devices are not the prefill mesh's.",
        show_default="1x1 on CPU, else derived from the devices",
        rich_help_panel=MESHES,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Most tokens of one request, prompt and answer together.",
        show_default="what the model and the memory allow",
        rich_help_panel=LIMITS,
    ),
]
PageSize = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens in one page of the KV cache.",
        show_default=str(EngineConfig.page_size),
        rich_help_panel=LIMITS,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Most sequences that run at once, per replica.",
        show_default="derived",
        rich_help_panel=LIMITS,
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Most tokens in one step, per replica: the token budget.",
        show_default="derived",
        rich_help_panel=LIMITS,
    ),
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Keep the KV of full pages and reuse it for prompts that begin alike.",
        show_default="on",
        rich_help_panel=LIMITS,
    ),
]
Kernels = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(KERNELS),
        help="Attention and page kernels. The log says which ones run and why.",
        show_default="auto: Pallas where it runs, else XLA",
        rich_help_panel=NUMERICS,
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of the KV page pool, per device: bytes, or 512MiB, 2GiB.",
        show_default="derived from the device",
        rich_help_panel=LIMITS,
    ),
]
MaxQueuedRequests = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Most requests that wait; one more is refused with a hint when to try again.",
        rich_help_panel=LIMITS,
    ),
]
ReserveTokens = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Room that is kept free for an answer before its prompt is computed. What grows longer takes pages as it "
        "needs them; where there are none, the youngest sequence gives up its own and is computed again later.",
        show_default=str(EngineConfig.reserve_tokens),
        rich_help_panel=LIMITS,
    ),
]
LocalPrefill = Annotated[
    str | None,
    typer.Option(
        metavar="never|auto|TOKENS",
        help="Prompts that the decode mesh computes itself: none, those so short that a hand-off does not pay by the "
        "times measured so far, or those of at most so many tokens that no cache has.",
        show_default=EngineConfig.local_prefill,
        rich_help_panel=MESHES,
    ),
]
StepTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="A device step that takes longer counts as stuck: the log gets all stacks, and its requests end with an "
        "error.",
        show_default=f"{EngineConfig.step_timeout_s:g}",
        rich_help_panel=LIMITS,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(DTYPES),
        help="Type of weights, KV cache and arithmetic.",
        show_default="float32 on CPU, bfloat16 on TPU and GPU",
        rich_help_panel=NUMERICS,
    ),
]
Seed = Annotated[
    int, typer.Option(metavar="S", help="Seed of what the engine draws by itself.", rich_help_panel=NUMERICS)
]
Precompile = Annotated[
    bool | None,
    typer.Option(
        "--precompile/--no-precompile",
        help="Compile every program at start, or each when it is first needed: a quicker start, and a request that "
        "waits now and then.",
        show_default="on for serve, off for generate",
        rich_help_panel=NUMERICS,
    ),
]
CompileCache = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        help="Folder that keeps compiled programs for the next start.",
        show_default="jaxpd's folder in the user's cache",
        rich_help_panel=NUMERICS,
    ),
]
