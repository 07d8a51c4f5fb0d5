"""Scheduled HLO read as values: exact, on programs small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodc_jax.aot import costs, hlo
from cocodc_jax.models.dispatch import FURTHER_ROUND

# A scan of 3 steps, each a product [4,8] x [8,16], its weights sliced from a stack.
LOOP = """
HloModule steps, is_scheduled=true, num_partitions=4

%weights (stack: f32[3,8,16], index: s32[]) -> f32[8,16] {
  %stack = f32[3,8,16]{2,1,0:T(8,128)} parameter(0)
  %index = s32[]{:T(128)} parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8,16]{2,1,0} dynamic-slice(%stack, %index, %zero, %zero), sizes={1,8,16}
  ROOT %squeezed = f32[8,16]{1,0} bitcast(%slice)
}

%body (carry: (s32[], f32[4,8], /*index=2*/f32[3,8,16])) -> (s32[], f32[4,8], f32[3,8,16]) {
  %carry = (s32[]{:T(128)}, f32[4,8]{1,0:S(1)}, f32[3,8,16]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %x = f32[4,8]{1,0:T(8,128)S(1)} get-tuple-element(%carry), index=1
  %stack.1 = f32[3,8,16]{2,1,0:T(8,128)} get-tuple-element(%carry), index=2
  %w = f32[8,16]{1,0} fusion(%stack.1, %i), kind=kLoop, calls=%weights
  %y = f32[4,16]{1,0} convolution(%x, %w), dim_labels=bf_io->bf, metadata={op_name="a(b)"}
  %gathered = f32[4,16]{1,0} all-reduce(%y), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %next = (s32[], f32[4,8], f32[3,8,16]) tuple(%i, %x, %stack.1)
}

%condition (carry.1: (s32[], f32[4,8], f32[3,8,16])) -> pred[] {
  %bound = s32[]{:T(128)} constant(3)
  %carry.1 = (s32[], f32[4,8], f32[3,8,16]) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  ROOT %is_less = pred[] compare(%i.1, %bound), direction=LT
}

ENTRY %main (first: f32[4,8], all: f32[3,8,16]) -> f32[4,8] {
  %first = f32[4,8]{1,0} parameter(0)
  %all = f32[3,8,16]{2,1,0} parameter(1)
  %start = s32[] constant(0)
  %in = (s32[], f32[4,8], f32[3,8,16]) tuple(%start, %first, %all)
  %loop = (s32[], f32[4,8], f32[3,8,16]) while(%in), condition=%condition, body=%body
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def with_entry(lines):
    return hlo.parse("ENTRY %main () -> f32[] {\n  " + "\n  ".join(lines) + "\n}\n")


def test_a_loop_of_a_scan_is_read():
    module = hlo.parse(LOOP)
    assert module.entry == "main"

    body = module.computations["body"]
    opcodes = [instruction.opcode for instruction in body.instructions[-4:]]
    assert opcodes == ["fusion", "convolution", "all-reduce", "tuple"]
    assert body.root.operands == ("i", "x", "stack.1")
    assert body.by_name["y"].operands == ("x", "w")

    assert module.executions == {"weights": 3, "body": 3, "condition": 1, "main": 1}
    assert module.fused == {"weights"}
    assert costs.flops(module) == 3 * 2 * 4 * 8 * 16


def test_bytes_are_of_slices_and_of_main_memory_only():
    # In each step the fusion reads a slice, 8 x 16, and the index, and writes the
    # slice; the product reads it (its left side is in VMEM) and writes 4 x 16, of
    # which the all-reduce reads and writes as much. The condition compares two numbers.
    step = 4 * (8 * 16 + 1 + 8 * 16) + 4 * (8 * 16 + 4 * 16) + 4 * 2 * 4 * 16
    assert costs.hbm_bytes(hlo.parse(LOOP)) == 3 * step + 9


def test_the_compilers_own_count_of_a_loop_comes_first():
    noted = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    assert hlo.parse(LOOP.replace("body=%body", noted)).executions["body"] == 7


def test_an_update_in_place_moves_the_update():
    module = hlo.parse(
        """
%update (all: f32[3,8], one: f32[1,8], at: s32[]) -> f32[3,8] {
  %all = f32[3,8]{1,0} parameter(0)
  %one = f32[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %new = f32[3,8]{1,0} dynamic-update-slice(%all, %one, %at, %at)
}
ENTRY %main (a: f32[3,8], b: f32[1,8], c: s32[]) -> f32[3,8] {
  %a = f32[3,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %d = f32[3,8]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%update
}
"""
    )
    assert costs.hbm_bytes(module) == 4 * (8 + 8 + 1)


def test_a_slice_in_a_fusion_within_a_fusion_reads_the_slice():
    module = hlo.parse("""
%inner (s: f32[8,4], n: s32[]) -> f32[1,4] {
  %s = f32[8,4] parameter(0)
  %n = s32[] parameter(1)
  ROOT %d = f32[1,4] dynamic-slice(%s, %n, %n), dynamic_slice_sizes={1,4}
}

%outer (j: s32[], t: f32[4,8]) -> f32[1,4] {
  %j = s32[] parameter(0)
  %t = f32[4,8] parameter(1)
  %u = f32[8,4] bitcast(%t)
  %e = f32[1,4] fusion(%u, %j), kind=kLoop, calls=%inner
  ROOT %o = f32[1,4] add(%e, %e)
}

ENTRY %main (i: s32[], x: f32[4,8]) -> f32[1,4] {
  %i = s32[]{:S(6)} parameter(0)
  %x = f32[4,8] parameter(1)
  ROOT %y = f32[1,4] fusion(%i, %x), kind=kLoop, calls=%outer
}
""")
    assert costs.hbm_bytes(module) == 4 * (4 + 4)


# HLO, and its operations by hand.
PRODUCTS = [
    # A kernel of 3 over 5 places, padded by one: 3 * 5 - 2 places meet an element.
    (
        ["%a = f32[1,5,4] parameter(0)", "%b = f32[3,4,6] parameter(1)",
         "%c = f32[1,5,6] convolution(%a, %b), window={size=3 pad=1_1},"
         " dim_labels=b0f_0io->b0f"],
        2 * 4 * 6 * 13,
    ),
    (
        ["%a = f32[2,16,8] parameter(0)", "%b = f32[2,8,32] parameter(1)",
         "%c = f32[2,16,32] dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0},"
         " lhs_contracting_dims={2}, rhs_contracting_dims={1}"],
        2 * 2 * 16 * 8 * 32,
    ),
    (
        ["%a = bf16[16,8] parameter(0)", "%b = bf16[8,32] parameter(1)",
         '%c = (bf16[16,32], s8[64]) custom-call(%a, %b),'
         ' custom_call_target="__cublas$gemm",'
         ' backend_config={"lhs_contracting_dimensions":["1"]}'],
        2 * 16 * 8 * 32,
    ),
    # Splash attention, blocks of 512: three of four. Its notes fill several lines.
    (
        ["%i = s8[1,2,2] parameter(0)", "%q = bf16[3,4,1024,64] parameter(1)",
         "%splash_mha_dq.2 = (f32[4], bf16[3,4,1024,64]) custom-call(%i, %q, %q, %q),"
         ' custom_call_target="tpu_custom_call", frontend_attributes={metadata={',
         '"block_q": 512',
         '}}, metadata={op_name="splash"}',
         "%a = bf16[16,8] parameter(2)", "%b = bf16[8,32] parameter(3)",
         "%c = f32[16,32] dot(%a, %b), lhs_contracting_dims={1}"],
        2 * 3 * 64 * 3 * 4 * 1024**2 * 3 / 4 + 2 * 16 * 8 * 32,
    ),
    # cuDNN's backward, five products; of 4 x 4 pairs ten lie below the diagonal.
    (
        ["%q = bf16[2,4,3,64] parameter(0)",
         "%c = (bf16[2,3,4,64], u8[0]) custom-call(%q, %q, %q),"
         ' custom_call_target="__cudnn$fmhaSoftmaxBackward"'],
        2 * 5 * 64 * 2 * 3 * 10,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), PRODUCTS)
def test_products_are_counted_as_they_are_computed(lines, expected):
    assert costs.flops(with_entry(lines)) == expected


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 7), st.integers(1, 4))
def test_a_batch_of_products_as_a_convolution_costs_as_a_dot(batch, rows, inner, cols):
    as_convolution = [
        f"%a = f32[{batch},{rows},{inner}] parameter(0)",
        f"%b = f32[{batch},{inner},{cols}] parameter(1)",
        f"%c = f32[{batch},{rows},{cols}] convolution(%a, %b), dim_labels=0bf_0io->0bf,"
        f" window={{size={batch} stride={max(batch - 1, 1)} lhs_dilate={batch}}}",
    ]
    expected = 2 * batch * rows * inner * cols
    assert costs.flops(with_entry(as_convolution)) == expected


def test_a_program_of_this_machine_is_read():
    def steps(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    shapes = (jnp.zeros((4, 8)), jnp.zeros((5, 8, 8)))
    module = hlo.parse(jax.jit(steps).lower(*shapes).compile().as_text())
    (loop,) = [x for comp in module for x in comp.instructions if x.opcode == "while"]
    assert module.trip_count(loop) == 5


def test_a_called_computation_runs_once_a_call():
    module = hlo.parse("""
%square (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4] parameter(0)
  ROOT %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4] parameter(0)
  %once = f32[4,4] call(%a), to_apply=%square
  ROOT %twice = f32[4,4] call(%once), to_apply=%square, metadata={op_name="jit(f)"}
}
""")
    assert module.executions == {"square": 2, "main": 1}
    assert costs.flops(module) == 2 * 2 * 4**3


@pytest.mark.parametrize("scope", ["", f"{FURTHER_ROUND}/"])
def test_rounds_that_an_even_router_does_not_need_do_not_run(scope):
    text = """
%square (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4] parameter(0)
  ROOT %y = f32[4,4] multiply(%x, %x)
}

ENTRY %main (p: pred[], a: f32[4,4]) -> f32[4,4] {
  %p = pred[] parameter(0)
  %a = f32[4,4] parameter(1)
  ROOT %b = f32[4,4] conditional(%p, %a, %a), true_computation=%square, \
false_computation=%square, metadata={op_name="jit(f)/SCOPEcond"}
}
"""
    module = hlo.parse(text.replace("SCOPE", scope))
    assert module.executions["square"] == (0 if scope else 2)


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("not HLO")


def test_computations_of_the_host_and_notes_of_kernels_are_parsed():
    module = hlo.parse("""
%called (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %twice = f32[4]{0} add(%x, %x)
}, execution_thread="host"

ENTRY %main (y: f32[4]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  %k = f32[4]{0} custom-call(%y), custom_call_target="kernel", backend_config={
notes
}, metadata={op_name="k"}
  ROOT %z = f32[4]{0} call(%k), called_computations={%called}
}
""")
    sizes = {computation.name: len(computation.instructions) for computation in module}
    assert sizes == {"called": 2, "main": 3}
    assert module.executions == {"called": 1, "main": 1}
