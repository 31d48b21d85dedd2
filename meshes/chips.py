"""The accelerators that programs are compiled for without having them, and what their makers say of them.

All figures are those of **one JAX device**. On v5p that is a chip with both of its TensorCores ("megacore"); on tpu7x a
chip is two devices, so its figures are half of the data sheet's.

Sources, as published by the makers: Google Cloud's documentation, the pages "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x
(Ironwood)"; NVIDIA's data sheets "H100 Tensor Core GPU" (SXM column) and "H200 Tensor Core GPU" (SXM), dense rates,
that is half of those printed "with sparsity". VMEM and the numbers of cores of TPUs are not on those pages: they are
jax's own (`pltpu.get_tpu_info`). Shared memory and registers are the CUDA programming guide's for compute capability
9.0. jax's table has the bandwidth of v5p as 2460 GB/s and Google's page as 2765; which is nearer to what a program can
reach we could not measure.
"""

from __future__ import annotations

import dataclasses

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of accelerator. Rates are peaks per second, sizes bytes, both of one JAX device."""

    name: str  # what we call it: "v5e"
    platform: str  # "tpu" or "gpu"
    device_kind: str  # what JAX calls it: "TPU v5 lite"
    cores: int  # TensorCores, or streaming multiprocessors
    peak_bf16: float  # dense FLOP/s
    hbm_bytes: int
    hbm_bandwidth: float  # bytes/s
    vmem_bytes: int = 0  # of one TensorCore; 0 on a GPU
    shared_memory_bytes: int = 0  # that one block may have; 0 on a TPU
    registers: int = 0  # 32-bit, of one multiprocessor; 0 on a TPU
    topologies: tuple[tuple[int, str], ...] = ()  # (devices, name for libtpu), smallest first; none for a GPU
    gpu_target: str = ""  # what XLA needs to know of a GPU: a GpuTargetConfigProto as text


_FLAT = ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"), (64, "8x8"), (128, "8x16"), (256, "16x16"))
_CUBES = ((1, "1x1x1"), (4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4"), (32, "2x4x4"), (64, "4x4x4"))


def _hopper(device_kind: str, *, bandwidth: int, memory: int, l2: int) -> str:
    """The description of a Hopper GPU of the SXM form: compute capability 9.0, 132 multiprocessors."""
    return (
        "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 "
        "shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 "
        "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
        f"memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: 1.98 device_memory_size: {memory} "
        "shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 } "
        "registers_per_core_limit: 65536 registers_per_block_limit: 65536 } "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{device_kind}"'
    )


V5E = Chip(
    name="v5e",
    platform="tpu",
    device_kind="TPU v5 lite",
    cores=1,
    peak_bf16=197e12,
    hbm_bytes=16 * GIB,
    hbm_bandwidth=819e9,  # newer revisions of the page say 800
    vmem_bytes=128 * MIB,
    topologies=_FLAT,
)
V5P = Chip(
    name="v5p",
    platform="tpu",
    device_kind="TPU v5",
    cores=2,
    peak_bf16=459e12,
    hbm_bytes=95 * GIB,
    hbm_bandwidth=2765e9,
    vmem_bytes=64 * MIB,
    topologies=_CUBES,
)
V6E = Chip(
    name="v6e",
    platform="tpu",
    device_kind="TPU v6 lite",
    cores=1,
    peak_bf16=918e12,
    hbm_bytes=32 * GIB,
    hbm_bandwidth=1638e9,  # other revisions of the page say 1600 and 1640
    vmem_bytes=128 * MIB,
    topologies=_FLAT,
)
TPU7X = Chip(
    name="tpu7x",
    platform="tpu",
    device_kind="TPU7x",
    cores=1,
    peak_bf16=2307e12 / 2,
    hbm_bytes=192 * GIB // 2,
    hbm_bandwidth=7380e9 / 2,
    vmem_bytes=64 * MIB,
    topologies=tuple((2 * devices, name) for devices, name in _CUBES),
)
H100 = Chip(
    name="H100",
    platform="gpu",
    device_kind="NVIDIA H100 80GB HBM3",
    cores=132,
    peak_bf16=989.4e12,
    hbm_bytes=80_000_000_000,
    hbm_bandwidth=3.35e12,
    shared_memory_bytes=227 * KIB,
    registers=64 * KIB,
    gpu_target=_hopper("NVIDIA H100 80GB HBM3", bandwidth=3_352_320_000_000, memory=84_978_434_048, l2=50 * MIB),
)
H200 = Chip(
    name="H200",
    platform="gpu",
    device_kind="NVIDIA H200",
    cores=132,
    peak_bf16=989.4e12,
    hbm_bytes=141_000_000_000,
    hbm_bandwidth=4.8e12,
    shared_memory_bytes=227 * KIB,
    registers=64 * KIB,
    # The L2 of 60 MiB is what the driver reports; the data sheet does not give it.
    gpu_target=_hopper("NVIDIA H200", bandwidth=4_800_000_000_000, memory=150_000_000_000, l2=60 * MIB),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (V5E, V5P, V6E, TPU7X, H100, H200)}


def find_chip(name: str) -> Chip:
    """The chip called `name`. Raises ValueError with the names there are."""
    if name not in CHIPS:
        raise ValueError(f'chip "{name}" is not known: use one of {", ".join(CHIPS)}')
    return CHIPS[name]
