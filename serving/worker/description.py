"""What a worker says of itself: role, sizes, what its KV is (`Identity`), and the model with its tokenizer.

A router that has no model of its own serves its clients with what the workers tell here.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile

from jaxpd.errors import InvalidArgument
from jaxpd.policies.workers import Role
from jaxpd.tokenizer import Tokenizer, load_tokenizer
from meshes.transfer.identity import Identity
from serving.model import ServedModel
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.wire import get

ROLES = {
    Role.PREFILL: pb.WORKER_ROLE_PREFILL,
    Role.DECODE: pb.WORKER_ROLE_DECODE,
    Role.MIXED: pb.WORKER_ROLE_MIXED,
}
_ROLES_BACK = {value: role for role, value in ROLES.items()}
_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """One worker. `model.meshes` are those of its pools; `model.tokenizer` is None in the welcome of a session.

    Counts are of one replica, but for `replicas`: those of one pool.
    """

    version: str  # of jaxpd
    instance: str  # drawn at its start: a worker that comes back is another one, with empty caches
    role: Role
    identity: Identity
    model: ServedModel
    replicas: int
    pages: int
    slots: int
    queue_limit: int
    page_bytes: int  # of one page as it crosses in a hand-off: all layers, every true KV head once


def description_to_proto(description: Description, *, tokenizer: bool = True) -> pb.DescribeResponse:
    """`tokenizer`: with its files, which take megabytes and, for a large one, a second; else it is left out."""
    model = description.model
    message = pb.DescribeResponse(
        version=description.version,
        instance=description.instance,
        role=ROLES[description.role],
        identity=identity_to_proto(description.identity),
        model=pb.Model(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            page_size=model.page_size,
        ),
        mode=model.mode,
        meshes=[f"{role}={spec}" for role, specs in model.meshes.items() for spec in specs],
        replicas=description.replicas,
        pages=description.pages,
        slots=description.slots,
        queue_limit=description.queue_limit,
        page_bytes=description.page_bytes,
    )
    if tokenizer and model.tokenizer is not None:
        message.model.tokenizer_json, message.model.tokenizer_config_json = _saved(model.tokenizer)
    return message


def description_from_proto(message: pb.DescribeResponse) -> Description:
    """Raises InvalidArgument for a role that is not known here, or a tokenizer that cannot be read."""
    role = _ROLES_BACK.get(message.role)
    if role is None:
        raise InvalidArgument(
            f"the worker {message.instance} (jaxpd {message.version}) has a role that this version of jaxpd does not "
            f"know (number {message.role}); upgrade the older of the two",
            field="role",
        )
    meshes: dict[str, tuple[str, ...]] = {}
    for entry in message.meshes:
        pool, _, spec = entry.partition("=")
        meshes[pool] = (*meshes.get(pool, ()), spec)
    model = message.model
    return Description(
        version=message.version,
        instance=message.instance,
        role=role,
        identity=identity_from_proto(message.identity),
        model=ServedModel(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=tuple(model.eos_token_ids),
            dtype=model.dtype,
            page_size=model.page_size,
            meshes=meshes,
            tokenizer=_loaded(get(model, "tokenizer_json"), get(model, "tokenizer_config_json")),
            mode=message.mode,
        ),
        replicas=message.replicas,
        pages=message.pages,
        slots=message.slots,
        queue_limit=message.queue_limit,
        page_bytes=message.page_bytes,
    )


def identity_to_proto(identity: Identity) -> pb.Identity:
    """Of a description, and of a peer's hello."""
    return pb.Identity(**dataclasses.asdict(identity))


def identity_from_proto(message: pb.Identity) -> Identity:
    """As it was said; `meshes.transfer.identity.agree` judges it."""
    return Identity(**{field.name: getattr(message, field.name) for field in dataclasses.fields(Identity)})


def _saved(tokenizer: Tokenizer) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(prefix="jaxpd-") as name:
        folder = pathlib.Path(name)
        tokenizer.save(folder)
        first, second = ((folder / file).read_text(encoding="utf-8") for file in _FILES)
        return first, second


def _loaded(*texts: str | None) -> Tokenizer | None:
    if texts[0] is None:
        return None
    with tempfile.TemporaryDirectory(prefix="jaxpd-") as name:
        folder = pathlib.Path(name)
        for file, text in zip(_FILES, texts, strict=True):
            if text is not None:
                (folder / file).write_text(text, encoding="utf-8")
        return load_tokenizer(folder)
