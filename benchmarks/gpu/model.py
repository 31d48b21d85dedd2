"""A Llama-3.1-8B-shaped model with random weights, through jaxpd's own compiled programs on one device.

prompt   tokens/s of one prompt of 2,048 tokens, in chunks of 512 and of 2,048
decode   tokens/s of 1, 16, 64 and 256 sequences with 1,024 tokens each, sampling included, beside what the copy
         bandwidth allows: the weights once and the live keys and values once a step
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .bench import Bench, OutOfTime

CONFIG = pathlib.Path(__file__).parent.parent / "model_configs" / "llama-3.1-8b.json"
PAGE_SIZE = 64
LOGITS = "logits.npy"
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "head_dim": 32,
}  # fmt: skip


def run(bench: Bench, kernels: str) -> None:
    """`kernels` is what is asked of every operation: "auto" or "xla"."""
    if importlib.util.find_spec("flax") is None:
        bench.row(kernels=kernels, skipped="flax is not installed: pip install flax, and this part runs")
        return
    with bench.attempt(kernels=kernels, what="model"):
        Model(bench, kernels).measure()


class Model:
    """The programs, the weights and a pool."""

    def __init__(self, bench: Bench, kernels: str) -> None:
        from jax.sharding import Mesh

        from jaxpd.models.config import from_hf
        from jaxpd.programs import ProgramSpec
        from meshes.sharding import DATA, MODEL, ShardingRules

        self.bench, self.kernels = bench, kernels
        raw = json.loads(CONFIG.read_text(encoding="utf-8"))
        self.config = from_hf({**raw, **TINY} if bench.smoke else raw)
        self.prompt, self.context = (64, 32) if bench.smoke else (2048, 1024)
        self.chunks: tuple[int, ...] = (32,) if bench.smoke else (512, 2048)
        self.sequences: tuple[int, ...] = (2,) if bench.smoke else (1, 16, 64, 256)
        self.page_size = 16 if bench.smoke else PAGE_SIZE
        self._drop_what_does_not_fit()
        most = max(self.sequences)
        mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (DATA, MODEL))
        self.spec = ProgramSpec(
            config=self.config, mesh=mesh, dtype=jnp.bfloat16, page_size=self.page_size, num_slots=most,
            num_pages=max(most * self.context, self.prompt) // self.page_size, shapes=(), rules=ShardingRules(),
            kernels=kernels,
        )  # fmt: skip
        self.weights = self._weights()
        self.pages, self.last = self.spec.new_state()

    def _drop_what_does_not_fit(self) -> None:
        """Numbers of sequences whose keys and values have no room beside the weights."""
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        if limit is None or self.bench.smoke:
            return
        room = int(limit - 2 * self.config.num_parameters() - 6e9)
        a_sequence = self.context * self.config.kv_bytes_per_token(2)
        for count in [n for n in self.sequences if n * a_sequence > room]:
            self.bench.row(kernels=self.kernels, sequences=count, skipped=f"{room / 1e9:.1f} GB are left for the pool")
        self.sequences = tuple(n for n in self.sequences if n * a_sequence <= room)

    def _weights(self) -> dict[str, jax.Array]:
        from jaxpd.models.decoder import abstract_params

        _, abstract = abstract_params(self.config, 1, jnp.bfloat16)
        draw = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
        key = jax.random.key(0)
        weights = {}
        for i, (path, p) in enumerate(abstract.items()):
            sharding = self.spec.on(self.spec.rules.spec(p.get_metadata("axes")))
            weights[path] = jax.device_put(draw(jax.random.fold_in(key, i), tuple(p.shape)), sharding)
        return weights

    @property
    def weight_bytes(self) -> int:
        """Read in a step: all of it but the embedding, of which a row a token is read."""
        tied = self.config.tie_embeddings
        return sum(w.nbytes for path, w in self.weights.items() if tied or not path.startswith("embed"))

    def measure(self) -> None:
        from jaxpd.batch import BatchShape
        from jaxpd.programs import Programs

        table = self.prompt // self.page_size
        shapes: dict[BatchShape, Callable[[Any], None]] = {}
        for count in sorted(self.sequences, key=lambda n: (n != 64, n)):  # the most telling first
            shapes[BatchShape(count, count, table)] = self._decode
        for chunk in reversed(self.chunks):
            shapes[BatchShape(chunk, 4, table)] = self._prompt
        self.programs = Programs()
        begin = time.perf_counter()
        pool = concurrent.futures.ThreadPoolExecutor(4)
        spec = self.spec
        tasks = {}
        for shape in shapes:
            one = type(spec)(**{**vars(spec), "shapes": (shape,)})
            tasks[shape] = [pool.submit(t) for _, t in self.programs.compile_tasks(one, gathers=False, scatters=False)]
        try:
            # All at once and before anything is timed: compiling tries kernels out on the same GPU.
            everything = [future for futures in tasks.values() for future in futures]
            concurrent.futures.wait(everything, timeout=max(0.0, 0.7 * self.bench.left()))
            for future in everything:
                future.cancel()  # those not begun; the rest of them end while we measure, and the rows say so
            self.bench.row(
                kernels=self.kernels, what="compiling", seconds=time.perf_counter() - begin, programs=len(everything),
                done=sum(f.done() and not f.cancelled() for f in everything),
                parameters=self.config.num_parameters(), weight_bytes_a_step=self.weight_bytes,
            )  # fmt: skip
            for shape, measure in shapes.items():
                with self.bench.attempt(kernels=self.kernels, what=str(shape)):
                    if not all(f.done() and not f.cancelled() for f in tasks[shape]):
                        raise OutOfTime("not measured: it was not compiled in time")
                    for future in tasks[shape]:
                        future.result()
                    measure(shape)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _step(self, shape: Any, rows: list[Any]) -> tuple[jax.Array, jax.Array]:
        """One step as a pool does it: the batch is packed and sent, the model run, a token sampled."""
        from jax.sharding import PartitionSpec as P

        from jaxpd.batch import pack
        from meshes.sharding import DATA

        packed = jax.device_put(pack(shape, [rows]), self.spec.on(P(DATA)))
        logits, self.pages, head = self.programs.forward[shape](self.weights, self.pages, self.last, packed)
        tokens, self.last = self.programs.sample[shape.rows](logits, self.last, head)
        return logits, tokens

    def _row(self, index: int, tokens: Any, context: int) -> Any:
        from jaxpd.batch import Row

        width = -(-context // self.page_size)
        pages = np.arange(index * width, (index + 1) * width, dtype=np.int32)
        return Row(tokens, context, pages, slot=index, output_index=0, seed=index, temperature=0.0)

    def _prompt(self, shape: Any) -> None:
        ids = np.random.default_rng(0).integers(0, self.config.vocab_size, self.prompt).astype(np.int32)
        chunks = [
            self._row(0, ids[i : i + shape.tokens], i + shape.tokens) for i in range(0, self.prompt, shape.tokens)
        ]

        def call() -> jax.Array:
            for chunk in chunks:
                logits, _ = self._step(shape, [chunk])
            return logits

        self._compare(shape, np.asarray(call())[0, 0])
        seconds = self.bench.timed(call, jax.block_until_ready)
        rate = self.prompt / seconds["median_s"]
        cfg, T = self.config, self.prompt
        dense = 2 * (cfg.num_parameters() - 2 * cfg.vocab_size * cfg.hidden_size) * T
        head = 2 * cfg.vocab_size * cfg.hidden_size * shape.rows * len(chunks)
        flops = dense + head + 2 * T * (T + 1) * cfg.num_heads * cfg.head_dim * cfg.num_layers
        self.bench.row(
            op="prompt", kernels=self.kernels, chunk=shape.tokens, prompt=T, tokens_per_s=rate,
            flops_per_s=flops / seconds["median_s"],
            share_of_matmul=self.bench.share(flops / seconds["median_s"], "matmul_flops_per_s"), time=seconds,
        )  # fmt: skip

    def _decode(self, shape: Any) -> None:
        from jaxpd.batch import from_slot

        count = shape.rows
        rows = [self._row(i, [from_slot(i)], self.context) for i in range(count)]
        seconds = self.bench.timed(lambda: self._step(shape, rows)[1], jax.block_until_ready)
        moved = self.weight_bytes + count * self.context * self.config.kv_bytes_per_token(2)
        rate = count / seconds["median_s"]
        copy = self.bench.known.get("copy_bytes_per_s")
        self.bench.row(
            op="decode", kernels=self.kernels, sequences=count, context=self.context, tokens_per_s=rate,
            ms=1e3 * seconds["median_s"], limit_tokens_per_s=count * copy / moved if copy else None,
            share_of_limit=self.bench.share(moved / seconds["median_s"], "copy_bytes_per_s"), time=seconds,
        )  # fmt: skip

    def _compare(self, shape: Any, logits: np.ndarray) -> None:
        """Leaves the last token's logits for the other run, or holds them against the other run's."""
        path = self.bench.folder / f"{shape.tokens}-{LOGITS}"
        if not path.exists():
            np.save(path, logits)
            return
        other = np.load(path)
        error = float(np.abs(logits - other).max() / np.abs(other).max())
        self.bench.row(
            what="logits of both kernel choices", chunk=shape.tokens, relative_error=error, ok=error < 5e-2,
            same_token=bool(logits.argmax() == other.argmax()),
        )  # fmt: skip
