"""The Hopper kernels for gathering and scattering pages, under simulated memory with race detection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu_pages
from pallas_kernels.dispatch import Call
from pallas_kernels.gather_pages import gather_pages
from pallas_kernels.names import GPU, GPU_INTERPRET
from pallas_kernels.scatter_pages import scatter_pages
from pallas_kernels.scatter_pages.gpu import live_first

interpreted = pytest.mark.skipif(
    jax.__version_info__[:2] < gpu_pages.MIN_JAX,
    reason=f"jax {jax.__version__} does not interpret Mosaic GPU kernels, 0.12 does (Python 3.12 or newer)",
)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few blocks, stages and bytes that small shapes go round the ring more than once."""
    monkeypatch.setattr(gpu_pages, "BLOCKS", 4)
    monkeypatch.setattr(gpu_pages, "PIECE_BYTES", 4096)
    monkeypatch.setattr(gpu_pages, "MAX_STAGES", 3)


def pool_and_heads(dtype: str, L: int, P: int, K: int, S: int, W: int, N: int) -> tuple[jax.Array, tuple]:
    rng = np.random.default_rng(0)

    def of(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.integers(-100, 100, shape), jnp.float32).astype(dtype)

    return of((L, P, K, S, W)), tuple(of((L, N, S, W)) for _ in range(K))


SHAPES = [  # L, P, K, S, W: one with pieces, one with a slot each, one with more tiles than stages
    ("float32", 1, 4, 1, 16, 256),
    ("bfloat16", 2, 6, 3, 8, 128),
    ("int8", 3, 5, 2, 8, 128),
    ("float8_e4m3fn", 1, 5, 1, 16, 128),
]


@interpreted
@pytest.mark.parametrize(("dtype", "L", "P", "K", "S", "W"), SHAPES)
def test_gather_equals_the_reference(dtype: str, L: int, P: int, K: int, S: int, W: int) -> None:
    pages, _ = pool_and_heads(dtype, L, P, K, S, W, 1)
    ids = jnp.array([P - 1, -2, 0, P + 7, 2], jnp.int32)
    got = jax.jit(lambda p, i: gather_pages(p, i, implementation=GPU_INTERPRET))(pages, ids)
    clamped = np.clip(ids, 0, P - 1)
    assert len(got) == K
    for k in range(K):
        assert np.asarray(got[k]).tobytes() == np.asarray(pages)[:, clamped, k].tobytes()


@interpreted
@pytest.mark.parametrize(("dtype", "L", "P", "K", "S", "W"), SHAPES)
def test_scatter_writes_the_pages_and_nothing_else(dtype: str, L: int, P: int, K: int, S: int, W: int) -> None:
    ids = np.array([P, P - 1, -1, 0, 2, -P], np.int32)
    pages, heads = pool_and_heads(dtype, L, P, K, S, W, len(ids))
    expected = np.array(pages)
    for n in (1, 3, 4):
        for k in range(K):
            expected[:, ids[n], k] = heads[k][:, n]
    run = jax.jit(lambda p, i, h: scatter_pages(p, i, h, implementation=GPU_INTERPRET))
    assert np.asarray(run(pages, jnp.asarray(ids), heads)).tobytes() == expected.tobytes()


@interpreted
def test_scatter_of_no_valid_page_writes_nothing() -> None:
    pages, heads = pool_and_heads("float32", 1, 4, 1, 8, 128, 2)
    run = jax.jit(lambda p, i, h: scatter_pages(p, i, h, implementation=GPU_INTERPRET))
    np.testing.assert_array_equal(run(pages, jnp.array([4, -1], jnp.int32), heads), pages)


@interpreted
def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more store in flight than the ring allows for: a stage is loaded while it is still being written out."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    monkeypatch.setattr(gpu_pages.Plan, "in_flight", 0)
    real = gpu_pages.mosaic_gpu()
    monkeypatch.setattr(gpu_pages, "mosaic_gpu", lambda: Loose(real))
    pages, _ = pool_and_heads("float32", 4, 4, 1, 8, 128, 1)
    assert gpu_pages.plan(4, 4, 1, 8, 128, 4).stages == 3
    with pytest.raises(Exception, match="(?i)race"):
        jax.block_until_ready(gather_pages(pages, jnp.arange(4, dtype=jnp.int32), implementation=GPU_INTERPRET))
    gpu_callbacks.reset_gpu_interpret_mode_state()


@interpreted
def test_a_planted_read_out_of_bounds_is_found_by_its_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA fills in zeros for what lies outside, and so does the interpreter: only the comparison of bytes can tell."""
    pages, _ = pool_and_heads("float32", 1, 4, 1, 8, 128, 1)
    monkeypatch.setattr(jnp, "clip", lambda x, low, high: x)
    (head,) = gather_pages(pages, jnp.array([4], jnp.int32), implementation=GPU_INTERPRET)
    assert not np.asarray(head).any() and np.asarray(pages)[:, 3].any()


class Loose:
    """Mosaic GPU whose waits for stores let one more run on."""

    def __init__(self, real: object) -> None:
        self._real = real

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def wait_smem_to_gmem(self, n: int, **options: bool) -> None:
        self._real.wait_smem_to_gmem(n + 1, **options)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ids", [[3], [-1, 5, 9, 0], [-1, 10], [0, 1, 2]])
def test_live_ids_stand_first(ids: list[int]) -> None:
    got, N = np.asarray(live_first(jnp.asarray(ids, jnp.int32), 10)), len(ids)
    live = [n for n, page in enumerate(ids) if 0 <= page < 10]
    assert got[2 * N] == len(live)
    assert list(got[: len(live)]) == live
    assert list(got[N : N + len(live)]) == [ids[n] for n in live]


@pytest.mark.parametrize("S", [8, 12, 16, 64, 256])
@pytest.mark.parametrize("W", [128, 256, 512])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_every_tile_is_cut_into_boxes_that_fit(S: int, W: int, itemsize: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plan = gpu_pages.plan(32, 64, 8, S, W, itemsize)
    assert plan.pieces * plan.rows * 128 == S * W
    assert plan.rows <= 256
    assert 2 <= plan.stages <= 16
    assert plan.stages * plan.rows * 128 * itemsize <= 200 * 1024


def test_refusals_name_their_reason() -> None:
    shapes = (("L", 2), ("N", 4), ("K", 8), ("S", 16), ("W", 256))

    def reason(chip: str, **changed: int) -> str | None:
        call = Call("gpu", chip, "bfloat16", "bfloat16", tuple((dict(shapes) | changed).items()))
        return gpu_pages.refuse(call)

    if jax.__version_info__[:2] < gpu_pages.MIN_JAX:
        assert "needs jax 0.12" in str(reason("NVIDIA H200"))
        return
    for chip in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB"):
        assert reason(chip) is None
    for chip in ("Tesla T4", "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA L40S", ""):
        assert "for Hopper" in str(reason(chip))
    assert "at most 32 KV slots" in str(reason("NVIDIA H200", K=64))
    assert "no page" in str(reason("NVIDIA H200", N=0))


def test_asking_elsewhere_says_why() -> None:
    pages, _ = pool_and_heads("float32", 1, 4, 1, 8, 128, 1)
    with pytest.raises(ValueError, match="it runs on gpu, not on cpu"):
        gather_pages(pages, jnp.zeros(2, jnp.int32), implementation=GPU)
