"""One typed configuration of an engine, filled by the command line, by `jaxpd.LLM` or from a file.

None means "derive it": `jaxpd.limits` turns an `EngineConfig` into the `Limits` that are used, and shows them.
"""

from __future__ import annotations

import dataclasses
import pathlib

from jaxpd.errors import InvalidArgument
from pallas_kernels.names import AUTO, NAMES

DISAGGREGATED = "disaggregated"
SHARED_MODES = ("decoupled", "chunked", "interleaved")  # one pool does both
MODES = (DISAGGREGATED, *SHARED_MODES)
NEVER = "never"
KERNELS = (AUTO, *NAMES)
DTYPES = ("float32", "bfloat16")
ROLES = ("prefill", "decode")  # of an engine that does only that


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may set. Counts are per replica, `kv_memory` is bytes per device."""

    mode: str | None = None
    role: str | None = None  # one of ROLES: the engine of a worker that hands over to others, with one pool on `mesh`
    mesh: str | None = None  # of the one pool of the modes that share it, or of the role
    prefill_mesh: str | None = None
    decode_mesh: str | None = None
    max_model_len: int | None = None
    page_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_memory: int | None = None
    max_queued_requests: int = 256
    reserve_tokens: int = 512  # of an answer; what grows beyond takes pages as they are needed
    local_prefill: str = NEVER  # prompts that the decode pool computes itself: "never", "auto", or up to so many tokens
    step_timeout_s: float = 300.0
    dtype: str | None = None
    prefix_cache: bool = True
    kernels: str = AUTO
    seed: int = 0
    precompile: bool = True  # every program at start; False: each when it is first used, while requests wait
    compile_cache: pathlib.Path | None = None  # None: the user's cache folder

    def __post_init__(self) -> None:
        self._check_mode()
        for field in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_memory",
            "max_queued_requests",
            "reserve_tokens",
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidArgument(f"--{field.replace('_', '-')} {value} must be at least 1", field=field)
        if self.page_size not in (8, 16, 32, 64, 128, 256):
            raise InvalidArgument(
                f"--page-size {self.page_size} must be a power of two from 8 to 256", field="page_size"
            )
        if not self.step_timeout_s > 0:
            raise InvalidArgument(
                f"--step-timeout {self.step_timeout_s} must be above 0 seconds", field="step_timeout_s"
            )
        self._check_local_prefill()
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidArgument(f"--dtype {self.dtype} must be one of {', '.join(DTYPES)}", field="dtype")
        if self.kernels not in KERNELS:
            raise InvalidArgument(f"--kernels {self.kernels} must be one of {', '.join(KERNELS)}", field="kernels")

    def _check_mode(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise InvalidArgument(f"--mode {self.mode} must be one of {', '.join(MODES)}", field="mode")
        if self.role is not None:
            self._check_role()
            return
        if self.mesh is not None and self.mode not in SHARED_MODES:
            raise InvalidArgument(
                f"--mesh {self.mesh} is for one pool that prefills and decodes: choose --mode "
                f"{', '.join(SHARED_MODES[:-1])} or {SHARED_MODES[-1]}, or give --prefill-mesh and --decode-mesh",
                field="mesh",
            )
        for role in ("prefill", "decode"):
            spec = getattr(self, f"{role}_mesh")
            if spec is not None and self.mode in SHARED_MODES:
                raise InvalidArgument(
                    f"--{role}-mesh {spec} is for --mode {DISAGGREGATED}: with --mode {self.mode} one pool prefills "
                    "and decodes, give its mesh with --mesh",
                    field=f"{role}_mesh",
                )

    def _check_role(self) -> None:
        if self.role not in ROLES:
            raise InvalidArgument(f"role {self.role} must be one of {', '.join(ROLES)}", field="role")
        for field in ("mode", "prefill_mesh", "decode_mesh"):
            if (value := getattr(self, field)) is not None:
                raise InvalidArgument(
                    f"--{field.replace('_', '-')} {value} is for a process that does both: a {self.role} worker has "
                    "one mesh, give it with --mesh",
                    field=field,
                )
        if self.local_prefill != NEVER:
            raise InvalidArgument(
                f"--local-prefill {self.local_prefill} is for a process that does both; leave it out for a "
                f"{self.role} worker",
                field="local_prefill",
            )

    def _check_local_prefill(self) -> None:
        asked = self.local_prefill
        if asked not in (NEVER, AUTO) and not (asked.isdecimal() and int(asked) > 0):
            raise InvalidArgument(
                f"--local-prefill {asked} must be {NEVER}, {AUTO}, or the most tokens of a prompt that the decode pool "
                "computes itself, from 1 on",
                field="local_prefill",
            )
        if asked != NEVER and self.mode in SHARED_MODES:
            raise InvalidArgument(
                f"--local-prefill {asked} is for --mode {DISAGGREGATED}: with --mode {self.mode} one pool computes all "
                "prompts; leave it out",
                field="local_prefill",
            )
