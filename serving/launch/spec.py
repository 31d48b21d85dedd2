"""What a cluster shall be: one frozen `ClusterSpec`, from the flags of `jaxpd up`, from a TOML file, or from both.

model = "smollm2-135m"
accelerator = "gpu"              # cpu, gpu or tpu; left out: what the nodes have

[router]
port = 8000
flags = ["--api-key-file", "/etc/jaxpd/keys.toml"]

[prefill]
count = 1
mesh = "2x1"

[decode]
count = 2
mesh = "1x2"
resources = { GPU = 2, CPU = 4 } # of one worker; left out: the mesh's devices, or one CPU
flags = ["--max-num-seqs", "64"]

[environment]                    # of every process
XLA_PYTHON_CLIENT_MEM_FRACTION = "0.9"
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from jaxpd.errors import InvalidArgument
from meshes.spec import MeshSpec, parse_mesh_specs

ROUTER = "router"
PREFILL, DECODE, MIXED = ROLES = ("prefill", "decode", "mixed")
ACCELERATORS = ("cpu", "gpu", "tpu")
MAX_COUNT = 1000  # of workers of one role: more is a slip of the keyboard
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """The workers of one role. `resources` are of one worker; empty means `default_resources`."""

    count: int = 0
    mesh: str = "1x1"
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    flags: tuple[str, ...] = ()  # for `jaxpd worker`, as they are


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Where clients come in; see `serving.config.ServerConfig`. Ports of 0 are any free ones."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    flags: tuple[str, ...] = ()  # for `jaxpd router`, as they are


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster. Raises InvalidArgument for what cannot be, naming the field: `decode.count`, `prefill.mesh`."""

    model: str
    name: str = "jaxpd"
    router: RouterSpec = RouterSpec()
    prefill: RoleSpec = RoleSpec()
    decode: RoleSpec = RoleSpec()
    mixed: RoleSpec = RoleSpec()
    accelerator: str | None = None
    node_host: str | None = None  # where processes listen for each other; None: the node's address
    ssl_certfile: str | None = None  # files of every node, and of the one that watches: `jaxpd router --help`
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    drain_timeout_s: float = 300.0  # what a worker that is not wanted any more gets for its requests
    start_timeout_s: float = 1800.0  # loading and compiling a large model takes minutes

    def __post_init__(self) -> None:
        if not self.model:
            _refuse("model", self.model, "must be a built-in name, a path or a hub id")
        if not _NAME.fullmatch(self.name):
            _refuse("name", self.name, "must be letters, digits, dots and dashes, at most 40")
        if self.accelerator is not None and self.accelerator not in ACCELERATORS:
            _refuse("accelerator", self.accelerator, f"must be one of {', '.join(ACCELERATORS)}")
        for field in ("drain_timeout_s", "start_timeout_s"):
            if not getattr(self, field) > 0:
                _refuse(field, getattr(self, field), "must be above 0 seconds")
        for port in ("port", "grpc_port"):
            if not 0 <= getattr(self.router, port) <= 65535:
                _refuse(f"router.{port}", getattr(self.router, port), "must be between 0 (any free port) and 65535")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            _refuse("ssl_keyfile", self.ssl_keyfile, "and ssl_certfile are a pair; give both or neither")
        for role in ROLES:
            _check_role(role, self.role(role))
        if not (self.mixed.count or (self.prefill.count and self.decode.count)):
            raise InvalidArgument(
                f"prefill.count = {self.prefill.count}, decode.count = {self.decode.count} and mixed.count = "
                f"{self.mixed.count} can serve nothing; there must be one prefill and one decode worker at least, or a "
                "mixed one (`jaxpd down` stops a cluster)",
                field="decode.count" if self.prefill.count else "prefill.count",
            )

    def role(self, role: str) -> RoleSpec:
        """The part of this role."""
        spec = getattr(self, role)
        assert isinstance(spec, RoleSpec)
        return spec

    @property
    def counts(self) -> dict[str, int]:
        """Wanted workers by role."""
        return {role: self.role(role).count for role in ROLES}

    def scaled(self, counts: Mapping[str, int]) -> ClusterSpec:
        """The same with other counts. Raises InvalidArgument."""
        for role in counts:
            if role not in ROLES:
                _refuse("scale", role, f"is no role; known are {', '.join(ROLES)}")
        changed: dict[str, Any] = {role: dataclasses.replace(self.role(role), count=n) for role, n in counts.items()}
        return dataclasses.replace(self, **changed)

    def with_ports(self, http: int, grpc: int) -> ClusterSpec:
        """The same with the ports that were found: a router that comes back must be where clients know it."""
        return dataclasses.replace(self, router=dataclasses.replace(self.router, port=http, grpc_port=grpc))


def default_resources(role: RoleSpec, accelerator: str) -> dict[str, float]:
    """What one worker takes of a node: what the spec says, or the devices of its mesh. On CPU every device of a mesh is
    a virtual one of the same processor: one CPU."""
    if role.resources:
        return dict(role.resources)
    if accelerator == "cpu":
        return {"CPU": 1.0}
    return {accelerator.upper(): float(_mesh(role.mesh, "mesh").num_devices)}


def parse_counts(text: str) -> dict[str, int]:
    """Of "decode=2" or "prefill=1,decode=2". Raises InvalidArgument naming --scale."""
    counts = {}
    for part in text.split(","):
        role, equals, number = (piece.strip() for piece in part.partition("="))
        if role not in ROLES or not equals or not number.isdecimal():
            raise InvalidArgument(
                f"--scale {text} must be ROLE=N, such as decode=2 or prefill=1,decode=2", field="scale"
            )
        if role in counts:
            raise InvalidArgument(f"--scale {text} names {role} twice; give one number for it", field="scale")
        counts[role] = int(number)
    return counts


def parse_resources(text: str, *, flag: str) -> dict[str, float]:
    """Of "GPU=2,CPU=4". Raises InvalidArgument naming the flag."""
    resources = {}
    for part in text.split(","):
        name, _, amount = (piece.strip() for piece in part.partition("="))
        try:
            resources[name] = float(amount)
        except ValueError:
            raise InvalidArgument(
                f"{flag} {text} must be NAME=AMOUNT with commas, such as GPU=2,CPU=4", field=flag.lstrip("-")
            ) from None
    return resources


def read_toml(path: pathlib.Path) -> dict[str, Any]:
    """The tables of a file, to be merged with flags and given to `cluster_spec`. Raises InvalidArgument."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"--file {path} cannot be read: {error.strerror}", field="file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--file {path} is not TOML: {error}", field="file") from None


def cluster_spec(tables: Mapping[str, Any]) -> ClusterSpec:
    """A spec of plain tables. Raises InvalidArgument naming the field that is unknown or must be something else."""
    fields: dict[str, Any] = dict(tables)
    for name, value in tables.items():
        if name in ROLES:
            fields[name] = _made(RoleSpec, name, value)
        elif name == ROUTER:
            fields[name] = _made(RouterSpec, name, value)
    spec = _made(ClusterSpec, "", {"model": ""} | fields)
    assert isinstance(spec, ClusterSpec)
    return spec


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "str": (str, "text"),
    "str | None": (str, "text"),
    "tuple[str, ...]": ((list, tuple), 'a list of texts, such as ["--max-num-seqs", "64"]'),
    "Mapping[str, float]": (dict, "a table of numbers, such as { GPU = 2 }"),
    "Mapping[str, str]": (dict, 'a table of texts, such as { NAME = "value" }'),
}


def _made(cls: type, where: str, table: Any) -> Any:
    """`cls` of a table whose values have the types that it names."""
    if not isinstance(table, Mapping):
        _refuse(where, table, "must be a table")
    types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    fields = {}
    for name, value in table.items():
        path = f"{where}.{name}" if where else name
        if name not in types:
            raise InvalidArgument(f"{path} is not known; known are {', '.join(types)}", field=path)
        kind, words = _KINDS.get(types[name], (None, ""))
        if kind is not None:
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            inner: Any = (int, float) if "float" in types[name] else str
            if not isinstance(value, kind) or isinstance(value, bool) or not all(isinstance(x, inner) for x in items):
                _refuse(path, value, f"must be {words}")
        fields[name] = tuple(value) if isinstance(value, list) else value
    return cls(**fields)


def _check_role(role: str, spec: RoleSpec) -> None:
    if not 0 <= spec.count <= MAX_COUNT:
        _refuse(f"{role}.count", spec.count, f"must be between 0 and {MAX_COUNT}")
    _mesh(spec.mesh, f"{role}.mesh")
    for name, amount in spec.resources.items():
        if not name or not amount >= 0:
            _refuse(f"{role}.resources", f"{name}={amount:g}", "must be a name and an amount of 0 or more")


def _mesh(text: str, where: str) -> MeshSpec:
    try:
        specs = parse_mesh_specs(text, name=where)
    except ValueError as error:
        raise InvalidArgument(str(error), field=where) from None
    if len(specs) != 1:
        _refuse(where, text, f"names {len(specs)} meshes; a worker has one: raise the count instead")
    return specs[0]


def _refuse(field: str, value: object, why: str) -> None:
    raise InvalidArgument(f"{field} = {value!r} {why}", field=field)
