"""The leaves of a trainer's tree that regions average; the others stay."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from cocodc_jax.region_sync.trees import Selection
from cocodc_jax.sync.cutting import cut

ONES = np.ones(2, np.float32)
BOXED = {"w": nn.Partitioned(np.ones((2, 2)), names=("in", None)), "b": ONES}


def equinox_mlp():
    return eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))


def nnx_state():
    return nnx.state(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu))


@pytest.mark.parametrize(
    ("make_tree", "path"),
    [
        (equinox_mlp, "layers/0/weight"),
        (nnx_state, "layers/0/kernel"),
        (lambda: BOXED, "w"),
        (lambda: {"w": jnp.ones(2), "unused": None}, "w"),
    ],
    ids=["equinox", "nnx", "boxed", "none"],
)
def test_the_tree_comes_back_with_its_structure(make_tree, path):
    tree = make_tree()
    selection = Selection.of(tree)
    arrays = selection.take(tree)
    assert path in arrays
    doubled = selection.put(tree, {path: 2 * x for path, x in arrays.items()})
    assert jax.tree.structure(doubled) == jax.tree.structure(tree)
    np.testing.assert_array_equal(selection.take(doubled)[path], 2 * arrays[path])


def test_counters_keys_and_functions_stay_the_regions_own():
    tree = {"w": jnp.ones(2), "count": jnp.int32(3), "key": jax.random.key(1), "f": abs}
    selection = Selection.of(tree)
    assert set(selection.take(tree)) == {"w"}
    back = selection.put(tree, {"w": jnp.zeros(2)})
    assert back["f"] is abs
    assert back["key"] is tree["key"]
    assert back["count"] is tree["count"]


def test_a_cut_of_the_trainers_tree_is_a_cut_of_the_paths():
    tree = {
        "b": {"w": jnp.ones((2, 3))},
        "a": nn.Partitioned(jnp.ones(4), names=(None,)),
    }

    selection = Selection.of(tree)
    fragments = cut(tree, 2)
    moved = selection.fragments(fragments)
    arrays = selection.take(tree)
    sizes = [sum(x.size for x in moved.take(arrays, k).values()) for k in range(2)]
    assert sizes == list(fragments.num_params)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"w": BOXED["w"], "v": ONES}}, "another leaf, 'a/v', than"),
        ({"a": {}}, "a leaf less, 'a/w', than"),
        ({"a": {"w": np.ones((2, 2))}}, "the same leaves in other containers"),
    ],
)
def test_a_tree_of_another_structure_is_refused_in_one_line(tree, message):
    boxed = {"a": {"w": BOXED["w"]}}
    with pytest.raises(ValueError, match=f"^params has {message}.*was made for$"):
        Selection.of(boxed).take(tree)
    with pytest.raises(ValueError, match="than the tree that fragments were cut of"):
        Selection.of(tree | {"n": jnp.ones(1)}).fragments(cut(boxed, 1))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"n": np.int32(1)}, "no floating-point arrays"),
        ({"z": np.ones(2, np.complex64)}, "'z' of dtype complex64"),
        (
            {"a/b": ONES, "a": {"b": ONES}},
            "two leaves whose path is 'a/b'",
        ),
    ],
)
def test_trees_without_a_mean_are_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        Selection.of(tree)
