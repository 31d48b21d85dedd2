"""Attention over pages the plain way, in float64 NumPy: what the tests hold every implementation against."""

from __future__ import annotations

import math

import numpy as np

from pallas_kernels.batch import RaggedBatch


def ragged_paged_attention_oracle(
    q_THD: np.ndarray,
    pages_LPKSW: np.ndarray,
    layer: int,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: np.ndarray | None = None,
) -> np.ndarray:
    """[T, H, D] float64, zeros for padding: one softmax a query token and head, over tokens read one by one."""
    T, H, D = q_THD.shape
    _, _, K, S, _ = pages_LPKSW.shape
    out_THD = np.zeros((T, H, D))
    starts, contexts, tables = (np.asarray(a) for a in (batch.query_starts, batch.context_lens, batch.page_table))
    for row in range(len(contexts)):
        first, last = int(starts[row]), int(starts[row + 1])
        context = int(contexts[row])
        kv_CKW = np.zeros((context, K, pages_LPKSW.shape[4]))
        for pos in range(context):
            kv_CKW[pos] = pages_LPKSW[layer, tables[row, pos // S], :, pos % S]
        for token in range(first, last):
            pos = context - (last - first) + token - first
            begin = 0 if sliding_window is None else max(0, pos - sliding_window + 1)
            for head in range(H):
                kv_CW = kv_CKW[begin : pos + 1, head // (H // K)]
                scores = kv_CW[:, :D] @ q_THD[token, head].astype(np.float64) * scale
                if soft_cap is not None:
                    scores = np.array([soft_cap * math.tanh(s / soft_cap) for s in scores])
                if sinks_H is not None:
                    scores = np.append(scores, sinks_H[head])
                weights = np.exp(scores - scores.max())
                weights = weights[: len(kv_CW)] / weights.sum()
                out_THD[token, head] = weights @ kv_CW[:, D : 2 * D]
    return out_THD
