"""Fragments: every number in exactly one, and back where it came from."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.sync import cutting, stacks
from cocodc_jax.sync.cutting import cut, cut_by_patterns
from cocodc_jax.transforms.layers import is_stack, named_leaves

STRATEGIES = [x for x in cutting.STRATEGIES if x != "experts"]  # These trees have none.
SETTINGS = settings(max_examples=25)


def tree(num_blocks, is_stacked, other=("embedding", "norm", "head"), width=2):
    """Numbers 0, 1, 2, ... in a tree; each block has two leaves."""
    shapes = {name: {"w": (3, width)} for name in other}
    if num_blocks and is_stacked:
        shapes["blocks"] = {"mlp": {"w": (num_blocks, width, 3)}, "b": (num_blocks, 4)}
    elif num_blocks:
        shapes["blocks"] = {
            str(i): {"mlp": {"w": (width, 3)}, "b": (4,)} for i in range(num_blocks)
        }

    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    counter = itertools.count()
    filled = [
        np.fromiter(counter, np.float32, count=int(np.prod(shape))).reshape(shape)
        for shape in leaves
    ]
    return treedef.unflatten(filled)


def units_of(fragments):
    """Which units each fragment holds, from its slices: names and block numbers."""
    held = []

    for slices in fragments.slices:
        units = set()
        for part in slices:
            parts = part.path.split("/")
            if parts[0] != "blocks":
                units.add(parts[0])
            elif part.rows is None:
                units.add(int(parts[1]))
            else:
                units.update(part.rows)
        held.append(units)

    return held


trees = st.builds(
    tree,
    num_blocks=st.integers(1, 6),
    is_stacked=st.booleans(),
    other=st.sets(st.sampled_from(["embedding", "norm", "head", "extra"])),
)


@SETTINGS
@given(trees, st.data())
def test_every_parameter_is_in_exactly_one_fragment(params, data):
    num_blocks = len(jax.tree.leaves(params["blocks"])[0])
    if "0" in params["blocks"]:
        num_blocks = len(params["blocks"])
    k = data.draw(st.integers(1, num_blocks))
    fragments = cut(params, k, data.draw(st.sampled_from(STRATEGIES)))

    taken = [fragments.take(params, i) for i in range(k)]
    numbers = [
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(part)]) for part in taken
    ]

    total = sum(x.size for x in jax.tree.leaves(params))
    assert np.sort(np.concatenate(numbers)).tolist() == list(range(total))
    assert len(fragments) == k
    assert fragments.num_params == tuple(x.size for x in numbers)
    assert fragments.num_bytes == tuple(4 * x.size for x in numbers)
    assert min(fragments.num_params) > 0

    jax.tree.map(np.testing.assert_array_equal, fragments.join(taken), params)


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_put_changes_one_fragment_and_no_other(is_stacked, lead, strategy):
    params = tree(7, is_stacked=is_stacked)
    fragments = cut(params, 3, strategy)
    if lead:
        params = jax.tree.map(lambda x: np.stack([x, x + 1000]), params)

    @jax.jit
    def negate(params):
        part = fragments.take(params, 1, lead)
        return fragments.put(params, 1, {k: -x for k, x in part.items()}, lead)

    changed = negate(params)

    for k in range(3):
        sign = -1 if k == 1 else 1
        before = fragments.take(params, k, lead)
        after = fragments.take(changed, k, lead)
        assert before.keys() == after.keys()
        for path in before:
            np.testing.assert_array_equal(after[path], sign * before[path])


# The paper's model: [embedding, 12 blocks, norm, head], K = 4, worked by hand.
PAPER = {
    "strided": [
        {"embedding", 3, 7, 11}, {0, 4, 8, "norm"}, {1, 5, 9, "head"}, {2, 6, 10},
    ],
    "sequential": [
        {"embedding", 0, 1, 2}, {3, 4, 5, 6}, {7, 8, 9, 10}, {11, "norm", "head"},
    ],
    # Sizes 10, 4 (each block), 1, 10: largest first, to the lightest so far, give
    # loads of 18, 18, 17 and 16.
    "balanced": [
        {"embedding", 6, 10}, {"head", 7, 11}, {0, 2, 4, 8, "norm"}, {1, 3, 5, 9},
    ],
}  # fmt: skip
# Blocks are of one tensor here.
PAPER["balanced_tensors"] = PAPER["balanced"]


@pytest.mark.parametrize("is_stacked", [False, True])
def test_the_leaves_of_one_fragment_are_enough_to_change_it(is_stacked):
    params = tree(4, is_stacked=is_stacked)
    fragments = cut(params, 2)
    only = fragments.only(params, 1)
    held = {part.leaf for part in fragments.slices[1]}
    assert len(jax.tree.leaves(only)) == len(held)

    value = {path: x + 1 for path, x in fragments.take(only, 1).items()}
    changed = fragments.over(params, fragments.put(only, 1, value))
    expected = fragments.put(params, 1, value)
    jax.tree.map(np.testing.assert_array_equal, changed, expected)


@pytest.mark.parametrize("num_fragments", [1, 5, 24])
def test_fragments_of_tensors_are_of_nearly_equal_size(num_fragments):
    """24 of 4 stacked blocks of 6 tensors and 3 others, as no cut of blocks gives."""
    sizes = [40, 40, 40, 30, 30, 5]
    params = {"embedding": np.zeros(40), "head": np.zeros(40), "norm": np.zeros(5)}
    stacks = zip("abcdef", sizes, strict=True)
    params["blocks"] = {name: np.zeros((4, size)) for name, size in stacks}
    loads = cut(params, num_fragments, "balanced_tensors").num_params
    assert sum(loads) == 4 * sum(sizes) + 85
    assert max(loads) - min(loads) <= max(sizes)

    empty = cut(
        {"a": np.zeros(4), "b": np.zeros(0), "c": np.zeros(0)}, 3, "balanced_tensors"
    )
    assert all(empty.slices)

    message = "num_fragments=28 does not fit a model of 27 tensors; use 1"
    with pytest.raises(ValueError, match=message):
        cut(params, 28, "balanced_tensors")


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_papers_model_by_hand(strategy, is_stacked):
    params = {
        n: np.zeros(s) for n, s in {"embedding": 10, "head": 10, "norm": 1}.items()
    }
    stack = np.arange(12.0)[:, None].repeat(4, axis=1)
    if is_stacked:
        params["blocks"] = {"w": stack}
    else:
        params["blocks"] = {str(i): {"w": row} for i, row in enumerate(stack)}

    fragments = cut(params, 4, strategy)
    assert units_of(fragments) == PAPER[strategy]

    if strategy == "balanced":
        assert fragments.num_params == (18, 18, 17, 16)

    if is_stacked:
        for k, units in enumerate(PAPER[strategy]):
            rows = [unit for unit in units if isinstance(unit, int)]
            taken = fragments.take(params, k)["blocks/w"]
            np.testing.assert_array_equal(taken, stack[sorted(rows)])


@SETTINGS
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    num_fragments=st.integers(1, 3),
)
def test_balanced_is_near_the_best_there_is(sizes, num_fragments):
    k = min(num_fragments, len(sizes))
    params = {
        "blocks": {str(i): {"w": np.zeros(s, np.float32)} for i, s in enumerate(sizes)}
    }
    largest = max(cut(params, k, "balanced").num_params)
    best = min(
        max(sum(s for s, o in zip(sizes, owner, strict=True) if o == j) for j in owner)
        for owner in itertools.product(range(k), repeat=len(sizes))
    )

    assert 3 * k * largest <= (4 * k - 1) * best  # Graham's bound, 4/3 - 1/(3K).


def test_bytes_count_each_leafs_own_dtype():
    params = {
        "embedding": jax.ShapeDtypeStruct((5, 2), jnp.bfloat16),
        "blocks": {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)},
    }
    fragments = cut(params, 2)
    assert fragments.num_params == (10 + 3, 3)
    assert fragments.num_bytes == (20 + 12, 12)


ROW = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("params", "options", "expected"),
    [
        # Blocks below another name, and two stacks.
        (
            {"encoder": {"layers": {"w": ROW}}, "decoder": {"layers": {"w": ROW}}},
            {"blocks": "layers"},
            [
                [("decoder/layers/w", (0,))],
                [("decoder/layers/w", (1,))],
                [("encoder/layers/w", (0,))],
                [("encoder/layers/w", (1,))],
            ],
        ),
        # Without blocks a tree is cut by its entries.
        ({"b": ROW, "a": {"w": ROW}}, {}, [[("a/w", None)], [("b", None)]]),
    ],
    ids=["two stacks", "no blocks"],
)
def test_a_tree_is_cut_by_its_named_blocks_or_by_its_entries(params, options, expected):
    fragments = cut(params, len(expected), **options)
    rows = [[(part.path, part.rows) for part in slices] for slices in fragments.slices]
    assert rows == expected


TWO = {"w": np.zeros((3, 4, 4)), "norm1": {"scale": np.zeros((3, 4))}}


@pytest.mark.parametrize(
    ("name", "is_scanned"),
    [("blocks", True), ("layers", True), ("stack", True), ("scan", True),
     ("ScanBlock_0", True), ("blocks/{}", False), ("blocks/block_{}", False),
     ("layers/{}", False), ("layers_{}", False), ("encoder_layers_{}", False)],
)  # fmt: skip
def test_cuts_and_transforms_see_the_same_stacks(name, is_scanned):
    paths = {name.format(i): TWO for i in range(1 if is_scanned else 3)}
    leaves = named_leaves({"embedding": np.zeros((9, 4))} | paths)
    places = stacks.find(leaves)
    assert {path for path, _ in leaves} - places.keys() == {"embedding"}
    for path, _ in leaves:
        is_one = path in places and places[path].layer is None
        assert is_stack(path) == is_one == (is_scanned and path in places)


def test_put_keeps_the_dtype_of_the_tree():
    params = {"blocks": {"w": jnp.zeros((2, 3), jnp.bfloat16)}}
    fragments = cut(params, 2)
    out = fragments.put(params, 1, {"blocks/w": jnp.ones((1, 3), jnp.float32)})
    assert out["blocks"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(out["blocks"]["w"][:, 0], [0, 1])


def test_patterns_take_leaves_that_earlier_ones_left():
    params = tree(2, is_stacked=False)
    fragments = cut_by_patterns(params, ["blocks/0", "blocks", ".*"])
    assert units_of(fragments) == [{0}, {1}, {"embedding", "norm", "head"}]
    taken = [fragments.take(params, k) for k in range(3)]
    jax.tree.map(np.testing.assert_array_equal, fragments.join(taken), params)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cut(tree(3, is_stacked=False), 2, "spiral"),
         r"fragment_strategy='spiral' is unknown; use one of \('strided', "),
        (lambda: cut(tree(3, is_stacked=True), 4),
         "num_fragments=4 does not fit a model of 3 blocks; use 1 to 3"),
        (lambda: cut(tree(3, is_stacked=False), 0),
         "num_fragments=0 does not fit a model of 3 blocks; use 1 to 3"),
        (lambda: cut(tree(3, is_stacked=False), 2.0), "num_fragments=2.0 does not fit"),
        (lambda: cut(tree(0, is_stacked=False), 4),
         "num_fragments=4 does not fit a model of 3 layers; use 1 to 3"),
        (lambda: cut({"blocks": {"a": np.zeros((2, 1)), "b": np.zeros((3, 1))}}, 2),
         r"stacked parameter 'blocks/b' has shape \(3, 1\), but 'blocks' holds 2 "),
        (lambda: cut({"blocks": {"a": np.zeros((2, 1)), "s": np.zeros(())}}, 2),
         r"stacked parameter 'blocks/s' has shape \(\), but 'blocks' holds 2 "),
        (lambda: cut_by_patterns(tree(1, is_stacked=False), ["blocks", "norm|head"]),
         "no fragment pattern matches parameter 'embedding/w'; patterns="),
        (lambda: cut_by_patterns(tree(1, is_stacked=False), [".*", "blocks"]),
         "fragment pattern 'blocks' matches no parameter that an earlier pattern"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_the_repair(call, message):
    with pytest.raises(ValueError, match=message):
        call()
