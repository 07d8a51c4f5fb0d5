"""Collectives of small scheduled programs: their axes, bytes and spans, exactly."""

import pytest

from cocodc_jax.aot.collectives import BETWEEN_SLICES, collectives
from cocodc_jax.aot.hlo import parse

MESH = {"region": 2, "data": 2, "model": 2}
HOSTS = (
    'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="r_0",'
    '_xla_megascale_transfer_type="%s"}'
)

LOOP = """
%body (c: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %c = (s32[], f32[4,4]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %x = f32[4,4] get-tuple-element(%c), index=1
  %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,4]) tuple(%n, %y)
}
%condition (d: (s32[], f32[4,4])) -> pred[] {
  %d = (s32[], f32[4,4]) parameter(0)
  %m = s32[] get-tuple-element(%d), index=0
  %k = s32[] constant(5)
  ROOT %less = pred[] compare(%m, %k), direction=LT
}
"""


def read(*lines, before="", mesh=MESH):
    text = before + "ENTRY %main () -> f32[] {\n  " + "\n  ".join(lines) + "\n}\n"
    return collectives(parse(text), mesh)


# An instruction; its axes and the bytes that a device receives, by hand.
ONE = [
    ("f32[8] all-reduce(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}",
     "all-reduce", ("model",), 2 * 32 / 2),
    ("bf16[8] all-gather(%a), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}",
     "all-gather", ("data",), 16 / 2),
    ("f32[2] reduce-scatter(%a), replica_groups=[2,4]<=[8], dimensions={0}",
     "reduce-scatter", ("data", "model"), 4 * 8 * 3 / 4),
    ("f32[8] all-to-all(%a), replica_groups={{0,4},{1,5},{2,6},{3,7}}",
     "all-to-all", ("region",), 32 / 2),
    ("u8[8] collective-permute(%a), source_target_pairs={{0,4},{4,0}}",
     "collective-permute", ("region",), 8),
    ("(f32[2], f32[4]) all-gather-start(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}",
     "all-gather", ("model",), 16 / 2),
    ("((f32[8], f32[4]), (f32[4], f32[2])) reduce-scatter-start(%a, %a), "
     "replica_groups={{0,1},{2,3},{4,5},{6,7}}",
     "reduce-scatter", ("model",), 48 / 2),
    ("((f32[8]), f32[8]) all-to-all-start(%a), replica_groups={{0,4},{1,5}}",
     "all-to-all", ("region",), 32 / 2),
    ("((f32[4], f32[4]), (f32[4], f32[4]), u32[], u32[]) all-to-all-start(%a, %a), "
     "replica_groups={{0,4},{1,5}}",
     "all-to-all", ("region",), 32 / 2),
    ("((u8[8]), u8[8]) collective-broadcast-start(%a), replica_groups={{0,4}}",
     "collective-broadcast", ("region",), 8),
    ("(f32[2], f32[3]) all-reduce(%a, %a), replica_groups={}",
     "all-reduce", ("region", "data", "model"), 2 * 20 * 7 / 8),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "axes", "num_bytes"), ONE)
def test_collectives_have_their_axes_and_bytes(text, kind, axes, num_bytes):
    (collective,) = read("%a = f32[2] parameter(0)", f"%b = {text}")
    assert (collective.kind, collective.axes) == (kind, axes)
    assert collective.num_bytes == num_bytes
    assert collective.times == 1
    assert collective.is_async == ("-start" in text)


def test_steps_of_one_collective_count_once_and_loops_multiply():
    text = "all-gather(%q), channel_id=7, replica_groups={{0,1}}"
    part = f"""
%async_collective_fusion.1 (q: f32[2]) -> f32[4] {{
  %q = f32[2] parameter(0)
  ROOT %g1 = f32[4] {text}
}}
%async_collective_fusion.2 (p: f32[2]) -> f32[4] {{
  %p = f32[2] parameter(0)
  ROOT %g2 = f32[4] {text.replace("%q", "%p")}
}}
"""

    inside = LOOP.replace(
        "%y = f32",
        "%f1 = f32[4] fusion(%n), kind=kCustom, calls=%async_collective_fusion.1\n"
        "  %f2 = f32[4] fusion(%n), kind=kCustom, calls=%async_collective_fusion.2\n"
        "  %y = f32",
    )

    (gather,) = read(
        "%i = (s32[], f32[4,4]) parameter(0)",
        "%w = (s32[], f32[4,4]) while(%i), condition=%condition, body=%body",
        before=part + inside,
    )

    assert (gather.times, gather.num_bytes, gather.is_async) == (5, 8, True)


def test_a_collective_after_a_loop_counts_once():
    step = "f32[4] all-gather(%{}), channel_id=7, replica_groups={{{{0,1}}}}"
    inside = LOOP.replace("%y = f32", f"%g1 = {step.format('x')}\n  %y = f32")

    in_and_after_loop = read(
        "%i = (s32[], f32[4,4]) parameter(0)",
        "%a = f32[2] parameter(1)",
        WHILE,
        f"%g2 = {step.format('a')}",
        "%r = f32[2] all-reduce(%a), channel_id=9, replica_groups={{0,4}}",
        before=inside,
    )

    times = {collective.kind: collective.times for collective in in_and_after_loop}
    assert times == {"all-gather": 5, "all-reduce": 1}


def test_collectives_with_one_channel_id_are_counted_separately():
    one = "f32[8] all-reduce(%a), channel_id=1, replica_groups={{0,1}}"
    both = read("%a = f32[8] parameter(0)", f"%b = {one}", f"%c = {one}")
    assert [collective.num_bytes for collective in both] == [32, 32]


def test_an_all_reduce_fused_with_its_slice_is_a_reduce_scatter():
    part = """
%all-reduce-scatter.3 (q: f32[8]) -> f32[4] {
  %q = f32[8] parameter(0)
  %r = f32[8] all-reduce(%q), channel_id=2, replica_groups={{0,1}}
  ROOT %s = f32[4] slice(%r), slice={[0:4]}
}
"""

    (scatter,) = read(
        "%a = f32[8] parameter(0)",
        "%b = f32[4] fusion(%a), kind=kCustom, calls=%all-reduce-scatter.3",
        before=part,
    )

    assert (scatter.kind, scatter.num_bytes) == ("reduce-scatter", 16)


WHILE = "%w = (s32[], f32[4,4]) while(%i), condition=%condition, body=%body"
START = "%s = f32[8] all-reduce-start(%a), replica_groups={{0,4}}"
DONE = "%d = f32[8] all-reduce-done(%s)"


IDLE = LOOP.replace("dot(", "add(")  # A loop without a product is no inner scan.


@pytest.mark.parametrize(
    ("order", "loop", "spans"),
    [
        ((START, WHILE, DONE), LOOP, True),
        ((START, DONE, WHILE), LOOP, False),
        ((WHILE, START, DONE), LOOP, False),
        ((START, WHILE, DONE), IDLE, False),
    ],
    ids=["beside", "before", "after", "idle"],
)
def test_a_collective_spans_the_loop_between_its_start_and_its_end(order, loop, spans):
    first = ("%a = f32[8] parameter(0)", "%i = (s32[], f32[4,4]) parameter(1)")
    (collective,) = read(*first, *order, before=loop)
    assert (collective.spans, collective.axes) == (spans, ("region",))


@pytest.mark.parametrize("num_early", [0, 1, 2])
def test_a_collective_of_the_hosts_spans_the_loop_before_its_arrival(num_early):
    """The end of sending may come first, once the host has taken the message."""
    attributes = HOSTS % "ALL_GATHER"
    ends = [
        "%sd = token[] send-done(%s), channel_id=2",
        "%rd = (f32[8], token[]) recv-done(%r), channel_id=1",
    ]
    early = ends[:num_early]
    late = ends[num_early:]

    # A gather of the devices has the same number.
    inside, between = read(
        "%a = f32[2] parameter(0)",
        "%i = (s32[], f32[4,4]) parameter(1)",
        "%g = f32[8] all-gather(%a), channel_id=2, replica_groups={{0,1,2,3}}",
        "%t = token[] after-all()",
        f"%s = (f32[2], u32[], token[]) send(%a, %t), channel_id=2, {attributes}",
        f"%r = (f32[8], u32[], token[]) recv(%t), channel_id=1, {attributes}",
        *early,
        WHILE,
        *late,
        before=LOOP,
        mesh={"region": 1, "data": 4},
    )

    assert (between.kind, between.axes) == ("all-gather", (BETWEEN_SLICES,))
    assert (between.num_bytes, between.spans) == (32, num_early < 2)
    assert (inside.axes, inside.num_bytes) == (("data",), 24)
