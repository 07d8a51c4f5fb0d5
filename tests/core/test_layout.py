"""Shardings of a training state over regions follow those of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc

MESH = Mesh(
    np.array(jax.devices()[:4]).reshape(2, 2),
    ("region", "data"),
    axis_types=(AxisType.Auto,) * 2,
)
PARAMS = {
    "layer": {"w": jnp.zeros((4, 6)), "b": jnp.zeros(3)},
    "value": jnp.zeros((6, 4)),
}
SPECS = {"layer": {"w": P(None, "data"), "b": P()}, "value": P("data")}
WHERE = jax.tree.map(
    lambda spec: NamedSharding(MESH, spec), SPECS, is_leaf=lambda x: isinstance(x, P)
)


@pytest.mark.parametrize(("axis", "lead"), [(0, ("region",)), (None, ())])
def test_a_leaf_is_sharded_as_the_parameter_that_its_path_ends_with(axis, lead):
    outer = {"layer/w": PARAMS["layer"]["w"], "value": PARAMS["value"]}
    tree = {"mu": PARAMS, "outer": (outer,), "count": jnp.zeros((), int)}
    shardings = cc.sync_shardings(tree, WHERE, axis)
    assert shardings["mu"]["layer"]["w"].spec == P(*lead, None, "data")
    assert shardings["mu"]["layer"]["b"].spec == P(*lead)
    assert shardings["outer"][0]["layer/w"].spec == P(*lead, None, "data")
    assert shardings["outer"][0]["value"].spec == P(*lead, "data")
    assert shardings["count"].spec == P(*lead)


def test_factors_that_do_not_divide_are_replicated_inside_a_region():
    factors = {"layer": {"w": jnp.zeros((4, 1))}, "value": jnp.zeros(())}
    shardings = cc.sync_shardings(factors, WHERE)
    assert {x.spec for x in jax.tree.leaves(shardings)} == {P("region")}


def test_a_state_is_laid_out_by_its_axes():
    tx = cc.synchronized(optax.adam(0.1), "diloco", axis_name="region")
    shapes = jax.eval_shape(tx.init, PARAMS)
    where = cc.sync_shardings(shapes, WHERE, cc.sync_axes("diloco"))
    assert jax.tree.structure(where) == jax.tree.structure(shapes)
    assert where.inner[0].mu["value"].spec == P("region", "data")
    assert where.outer[0]["layer/w"].spec == P(None, "data")
    assert where.step.spec == P()


def test_shardings_without_leaves_are_refused():
    with pytest.raises(ValueError, match="pass those of one region's params"):
        cc.sync_shardings(PARAMS, {})


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_first_state_is_divided_as_the_parameters_are(axis_type):
    """Fragments in flight, which start as zeros, too."""
    mesh = Mesh(MESH.devices, MESH.axis_names, axis_types=(axis_type,) * 2)
    params = jax.tree.map(
        lambda x, where: jax.device_put(x, NamedSharding(mesh, where.spec)),
        PARAMS,
        WHERE,
    )

    method = cc.methods.get(
        "streaming_diloco", num_fragments=1, delay_steps=1, compress="ef+int8"
    )
    tx = cc.synchronized(optax.adam(0.1), method, axis_name="region")
    with jax.set_mesh(mesh):
        state = tx.init(params)

    (trace,) = (x.trace for x in state.opt_states[0] if hasattr(x, "trace"))
    residual = state.memories[0].residual
    for fragment in (state.outer[0], trace, state.means[0], residual):
        of_layer = fragment["layer/w"].sharding
        assert of_layer.is_equivalent_to(params["layer"]["w"].sharding, 2)
        assert fragment["value"].sharding.is_equivalent_to(params["value"].sharding, 2)
