"""Bytes are counted from HLO text where arrays lie in HBM, and only what is moved."""

from __future__ import annotations

from benchmarks.hbm import hbm_bytes

TEXT = """HloModule m

%fused (p0: bf16[64,128], p1: bf16[128,256]) -> bf16[64,256] {
  %p0 = bf16[64,128]{1,0:S(1)} parameter(0)
  %p1 = bf16[128,256]{1,0} parameter(1)
  ROOT %dot = bf16[64,256]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%rows (table: bf16[1000,128], ids: s32[8,1]) -> bf16[8,128] {
  %table = bf16[1000,128]{1,0} parameter(0)
  %ids = s32[8,1]{1,0} parameter(1)
  ROOT %gather = bf16[8,128]{1,0} gather(%table, %ids), offset_dims={1}
}

%update (big: f32[100,10], small: f32[1,10], at: s32[]) -> f32[100,10] {
  %big = f32[100,10]{1,0} parameter(0)
  %small = f32[1,10]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %dus = f32[100,10]{1,0} dynamic-update-slice(%big, %small, %at, %at)
}

%body (c: (f32[4])) -> (f32[4]) {
  %c = (f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%c), index=0
  %y = f32[4]{0} negate(%x)
  ROOT %t = (f32[4]{0}) tuple(%y)
}

ENTRY %main (w: bf16[128,256], table: bf16[1000,128], big: f32[100,10], pool: bf16[5000]) -> bf16[64,256] {
  %w = bf16[128,256]{1,0} parameter(0)
  %table = bf16[1000,128]{1,0} parameter(1)
  %big = f32[100,10]{1,0} parameter(2)
  %pool = bf16[5000]{0} parameter(3)
  %ids = s32[8,1]{1,0:S(1)} constant({...})
  %x = bf16[64,128]{1,0:S(1)} constant({...})
  %small = f32[1,10]{1,0} constant({...})
  %at = s32[]{:S(1)} constant(0)
  %c4 = (f32[4]{0}) tuple(%big)
  %start = (bf16[128,256]{1,0:S(1)}, bf16[128,256]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %done = bf16[128,256]{1,0:S(1)} copy-done(%start)
  %in_vmem = bf16[64,256]{1,0:S(1)} fusion(%x, %done), kind=kOutput, calls=%fused
  %embedded = bf16[8,128]{1,0:S(1)} fusion(%table, %ids), kind=kLoop, calls=%rows
  %updated = f32[100,10]{1,0} fusion(%big, %small, %at), kind=kLoop, calls=%update
  %loop = (f32[4]{0}) while(%c4), body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %kernel = bf16[16]{0} custom-call(%pool, %in_vmem), custom_call_target="tpu_custom_call"
  ROOT %out = bf16[64,256]{1,0} copy(%in_vmem)
}
"""


def test_each_kind_counts_what_it_moves() -> None:
    assert hbm_bytes(TEXT, pool_bytes=10_000) == {
        "copy-start": 128 * 256 * 2,  # read from HBM, written to VMEM
        "matmul": 0,  # all of it in VMEM
        "fusion": 8 * 128 * 2 + 2 * 40,  # eight rows of the table; the update is read and written
        "negate": 7 * 2 * 16,  # seven rounds
        "kernel operands": 32,  # not the pool
        "copy": 64 * 256 * 2,
    }
