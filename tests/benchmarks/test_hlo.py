"""The reader of HLO text, on lines that libtpu 0.0.52 wrote (shortened)."""

from __future__ import annotations

from benchmarks.hlo import instructions, kernel_calls, makers_of

SCOPED = '"scoped_memory_configs":[{"memory_space":"1","offset":"1024","size":"4096"}]'
USED = '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"3072"}]'
TEXT = f"""
ENTRY %main {{
  %param.1 = bf16[1,2,8,1,64,256]{{5,4,3,2,1,0:T(8,128)(2,1)}} parameter(15), metadata={{op_name="pages"}}
  %bitcast.1 = bf16[2,8,1,64,256]{{4,3,2,1,0:T(8,128)(2,1)}} bitcast(%param.1)
  %copy-start.2 = (bf16[2,8,1,64,256]{{4,3,2}}, bf16[2,8,1,64,256]{{4,3,2}}, u32[]{{:S(2)}}) copy-start(%bitcast.1)
  %write.1 = bf16[2,8,1,64,256]{{4,3,2,1,0}} custom-call(%a, %bitcast.1), custom_call_target="tpu_custom_call", \
output_to_operand_aliasing={{{{}}: (1, {{}})}}, metadata={{op_name="jit(f)/write"}}, backend_config={{{SCOPED},{USED}}}
  %move.1 = bf16[4]{{0}} custom-call(%a), custom_call_target="tpu_custom_call", \
metadata={{op_name="jit(f)/move"}}, backend_config={{"scoped_memory_configs":[],{USED}}}
  ROOT %tuple.1 = (f32[1,64]{{1,0}}, f32[2,8,1,64,256]{{4,3,2,1,0}}) tuple(%x, %y)
}}
"""


def test_makers_of_an_array_are_found_by_size_and_dtype_in_tuples_too() -> None:
    makers = makers_of(TEXT, "bf16", (2, 8, 64, 256))
    assert [(one.operation, one.aliases_an_operand) for one in makers] == [
        ("parameter", False), ("bitcast", False), ("copy-start", False), ("custom-call", True),
    ]  # fmt: skip
    assert [one.operation for one in makers_of(TEXT, "f32", (2, 8, 1, 64, 256))] == ["tuple"]
    assert len(instructions(TEXT)) == 6


def test_the_memory_of_a_kernel_is_counted_from_where_its_part_begins() -> None:
    write, move = kernel_calls(TEXT)
    assert (write.name, write.vmem_bytes, write.vmem_limit_bytes) == ("jit(f)/write", 2048, 4096)
    assert (move.name, move.vmem_bytes, move.vmem_limit_bytes) == ("jit(f)/move", 3072, None)
