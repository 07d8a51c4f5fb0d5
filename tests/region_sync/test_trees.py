"""What regions average of a trainer's tree, and that the rest stays where it was."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from cocodc_jax.region_sync.trees import Selection
from cocodc_jax.sync.cutting import cut

MLP = eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))
NNX = nnx.state(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu))
BOXED = {"w": nn.Partitioned(jnp.ones((2, 2)), names=("in", None)), "b": jnp.ones(2)}
TREES = {
    "equinox": (MLP, "layers/0/weight"),
    "nnx": (NNX, "layers/0/kernel"),
    "boxed": (BOXED, "w"),
    "none": ({"w": jnp.ones(2), "unused": None}, "w"),
}


@pytest.mark.parametrize("name", TREES)
def test_the_tree_comes_back_with_its_structure(name):
    tree, path = TREES[name]
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
        ({"a": {"w": BOXED["w"], "v": jnp.ones(2)}}, "another leaf, 'a/v', than"),
        ({"a": {}}, "a leaf less, 'a/w', than"),
        ({"a": {"w": jnp.ones((2, 2))}}, "the same leaves in other containers"),
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
        ({"n": jnp.int32(1)}, "no floating-point arrays"),
        ({"z": jnp.ones(2, complex)}, "'z' of dtype complex64"),
        (
            {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}},
            "two leaves whose path is 'a/b'",
        ),
    ],
)
def test_trees_without_a_mean_are_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        Selection.of(tree)
