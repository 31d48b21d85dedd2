"""From a configuration to running pools: meshes, limits, weights, programs. Everything slow at start is here.

place        mesh specs -> devices -> limits            nothing is read or allocated
build_pools  programs compiled in parallel, weights onto the meshes, page pools made
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpd.checkpoints.placement import load_params
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.compiles import compiled
from jaxpd.config import DISAGGREGATED, SHARED_MODES, EngineConfig
from jaxpd.device import PoolDevice
from jaxpd.errors import FailedPrecondition, InvalidArgument
from jaxpd.limits import Limits, Memory, make_limits, weight_bytes_per_device
from jaxpd.multihost.leader import Followers
from jaxpd.policies.batching import POLICIES
from jaxpd.pool import Owner, Pool
from jaxpd.programs import Programs, ProgramSpec
from jaxpd.progress import Progress
from meshes.devices import assign_devices, default_specs, ensure_cpu_devices, shared_mesh, total_devices
from meshes.sharding import DATA, MODEL, ShardingRules
from meshes.spec import MeshSpec, parse_mesh_specs
from pallas_kernels.names import AUTO, GPU_INTERPRET, NAMES, PLATFORM_OF

log = logging.getLogger(__name__)

DEFAULT_CPU_DEVICES = 2  # 1x1 + 1x1
# On CPU, JAX has one pool of threads for programs and for the copies of the transfer server, as large as there are
# devices or cores. With a core and a device, as in a container, no KV crossed as long as prompts were computed.
TRANSFER_THREADS = 2
GPU_INTERPRETER_DEVICES = 16  # JAX has a thread for each; with few, the interpreter's threads of a kernel wait for ever


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where everything will go: meshes by role, and the limits."""

    mode: str
    meshes: list[Mesh]  # in the order of `limits.pools`
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Given:
    """The mesh specs that were asked for; None where one was left out."""

    prefill: tuple[MeshSpec, ...] | None
    decode: tuple[MeshSpec, ...] | None
    shared: MeshSpec | None


def prepare_devices(config: EngineConfig) -> Given:
    """The mesh specs that were given; on CPU their virtual devices are made.

    Call it before a checkpoint is resolved: opening an Orbax folder starts JAX's backend, which fixes the devices.
    Raises InvalidArgument for a spec that does not parse, FailedPrecondition when the backend has too few devices.
    """
    prefill, decode = _parse(config.prefill_mesh, "--prefill-mesh"), _parse(config.decode_mesh, "--decode-mesh")
    shared = _parse(config.mesh, "--mesh")
    if shared is not None and len(shared) > 1:
        raise InvalidArgument(
            f"--mesh {config.mesh} names {len(shared)} meshes, need one: one pool does both", field="mesh"
        )
    given = Given(prefill, decode, shared[0] if shared else None)
    one = (MeshSpec(1, 1),)
    wanted = max(total_devices(prefill or one, decode or one), total_devices(shared or one), DEFAULT_CPU_DEVICES)
    if config.role is not None:
        wanted = total_devices(shared or one)
        if not jax.distributed.is_initialized():  # otherwise the mesh takes all devices there are, and they are there
            wanted += TRANSFER_THREADS
    if config.kernels == GPU_INTERPRET:
        wanted = max(wanted, GPU_INTERPRETER_DEVICES)
    try:
        ensure_cpu_devices(wanted)
    except RuntimeError as error:
        raise FailedPrecondition(str(error), field="prefill_mesh") from error
    return given


def place(checkpoint: Checkpoint, config: EngineConfig) -> Placement:
    """Meshes and limits for a model. Raises InvalidArgument or FailedPrecondition before anything is allocated."""
    given = prepare_devices(config)
    devices = jax.devices()
    memory = _memory(devices[0])
    _check_kernels(config.kernels, memory.platform)
    mode, fits = _mode(config, devices), _weights_fit_one(checkpoint, config, memory)
    if mode in SHARED_MODES or config.role is not None:  # one pool
        try:
            mesh = shared_mesh(given.shared, devices, weights_fit_one_device=fits)
        except ValueError as error:
            raise InvalidArgument(str(error), field="mesh") from error
        spec = MeshSpec(mesh.shape[MODEL], mesh.shape[DATA])
        roles: dict[str, tuple[MeshSpec, ...]] = {"prefill": (), "decode": (), "mixed": ()}
        roles[config.role or "mixed"] = (spec,)
        return Placement(mode, [mesh], make_limits(checkpoint.name, checkpoint.config, config, memory=memory, **roles))
    try:
        prefill, decode = default_specs(
            given.prefill,
            given.decode,
            platform=memory.platform,
            available=len(devices),
            weights_fit_one_device=fits,
        )
        meshes = assign_devices(prefill, decode, devices)
    except ValueError as error:
        raise InvalidArgument(str(error), field="prefill_mesh") from error
    limits = make_limits(checkpoint.name, checkpoint.config, config, prefill, decode, memory)
    return Placement(mode, meshes[0] + meshes[1], limits)


def _mode(config: EngineConfig, devices: list[jax.Device]) -> str:
    """The mode that was asked for, or the one that the devices allow."""
    if config.mode is not None:
        return config.mode
    if config.role is not None:
        return DISAGGREGATED
    if len(devices) == 1 and devices[0].platform != "cpu" and not (config.prefill_mesh or config.decode_mesh):
        log.info("there is one %s device, too few for a prefill and a decode mesh: --mode chunked", devices[0].platform)
        return "chunked"
    return DISAGGREGATED


def _check_kernels(kernels: str, platform: str) -> None:
    wanted = PLATFORM_OF.get(kernels, platform)
    if wanted != platform:
        others = [name for name in (AUTO, *NAMES) if PLATFORM_OF.get(name, platform) == platform]
        raise InvalidArgument(
            f"--kernels {kernels} runs on {wanted}, but this is {platform}: use one of {', '.join(others)}",
            field="kernels",
        )


def _parse(text: str | None, flag: str) -> tuple[MeshSpec, ...] | None:
    if text is None:
        return None
    try:
        return parse_mesh_specs(text, name=flag)
    except ValueError as error:
        raise InvalidArgument(str(error), field=flag.strip("-").replace("-", "_")) from error


def _memory(device: jax.Device) -> Memory:
    stats = None if device.platform == "cpu" else device.memory_stats()
    limit = (stats or {}).get("bytes_limit")
    return Memory(platform=device.platform, device_bytes=limit, host_bytes=free_host_memory())


def free_host_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # no better reading: all there is


def _weights_fit_one(checkpoint: Checkpoint, config: EngineConfig, memory: Memory) -> bool:
    if memory.device_bytes is None:
        return True
    weights = weight_bytes_per_device(checkpoint.config, 1, np.dtype(config.dtype or "bfloat16"), ShardingRules())
    return weights < memory.device_bytes * 0.8  # leaves a fifth for KV


def build_pools(
    placement: Placement,
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    owner: Owner,
    progress: Progress,
    followers: Followers | None = None,
) -> list[Pool]:
    """Pools ready to start, in the order of `limits.pools`. `followers` have a part of the one mesh there is."""
    limits, rules, meshes = placement.limits, ShardingRules(), placement.meshes
    use_compile_cache(config.compile_cache)
    dtype = np.dtype(limits.dtype)
    specs = [
        ProgramSpec(
            config=checkpoint.config,
            mesh=mesh,
            dtype=dtype,
            num_pages=pool.num_pages,
            page_size=limits.page_size,
            num_slots=pool.rows,
            shapes=pool.shapes,
            rules=rules,
            kernels=config.kernels,
        )
        for pool, mesh in zip(limits.pools, meshes, strict=True)
    ]
    if followers is not None:
        followers.prepare(specs[0], limits.pools[0].role, checkpoint)
    try:
        # before the weights: what compiling needs for a while is free by then
        programs = _compile(limits, specs, progress, at_once=config.precompile)
    except ValueError as error:
        if config.kernels == AUTO:
            raise
        raise InvalidArgument(f"--kernels {config.kernels}: {error}", field="kernels") from error
    _return_free_memory()
    params = load_params(checkpoint.source, checkpoint.config, meshes, dtype=dtype, rules=rules, progress=progress)
    _return_free_memory()
    pools: list[Pool] = []
    for i, (pool, spec) in enumerate(zip(limits.pools, specs, strict=True)):
        index = sum(other.role == pool.role for other in pools)
        make = PoolDevice if followers is None else followers.device
        device = make(spec, params[i], programs[i])
        pools.append(Pool(index, pool, device, owner, policy=POLICIES[placement.mode]))
    return pools


def _compile(limits: Limits, specs: list[ProgramSpec], progress: Progress, *, at_once: bool) -> list[Programs]:
    """The programs of all pools: compiled in parallel threads, or each when it is first used."""
    programs = [Programs() for _ in specs]
    tasks: list[tuple[str, Callable[[], None]]] = []
    for i, (pool, spec) in enumerate(zip(limits.pools, specs, strict=True)):
        kinds = {
            "gathers": pool.role == "prefill",
            "scatters": pool.role == "decode",
            "scores": pool.role != "decode",
        }
        if at_once:
            found = programs[i].compile_tasks(spec, **kinds)
            tasks += [(f"{pool.role} {pool.spec} {name}", task) for name, task in found]
        else:
            programs[i].compile_later(spec, **kinds)
    if not at_once:
        progress.note("programs are compiled when they are first needed (--precompile: all of them now)")
        return programs
    tasks.sort(key=lambda named: "forward" not in named[0])  # the long ones first, so that threads end together
    with (
        progress.stage("compiling", total=float(len(tasks)), unit="programs") as stage,
        ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="jaxpd-compile") as executor,
    ):
        running = {executor.submit(_timed, task): name for name, task in tasks}
        for future in as_completed(running):
            seconds, cached = future.result()
            stage.advance(1.0, f"{running[future]} ({'from the cache' if cached else f'{seconds:.1f} s'})")
    return programs


def _return_free_memory() -> None:
    """Gives what compiling left in the allocator back to the system (glibc only; elsewhere it stays where it is)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_hits = threading.local()  # set by the listener below, in the thread that compiles


def _on_monitoring_event(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _hits.count = getattr(_hits, "count", 0) + 1


def _on_monitoring_duration(event: str, duration_secs: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compiled(duration_secs)


jax.monitoring.register_event_listener(_on_monitoring_event)
jax.monitoring.register_event_duration_secs_listener(_on_monitoring_duration)


def _timed(task: Callable[[], None]) -> tuple[float, bool]:
    before, start = getattr(_hits, "count", 0), time.monotonic()
    task()
    return time.monotonic() - start, getattr(_hits, "count", 0) > before


def use_compile_cache(folder: pathlib.Path | None) -> pathlib.Path:
    """Makes JAX keep compiled programs in `folder` (default: the user's cache folder); returns it."""
    if folder is None:
        from jaxpd.checkpoints.builtin import default_cache_dir

        folder = default_cache_dir().parent / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(
            f"--compile-cache {folder} cannot be made ({error.strerror}); name a folder that can be written",
            field="compile_cache",
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
