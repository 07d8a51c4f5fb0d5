"""Records of a mixture of experts."""

import jax.numpy as jnp
import numpy as np

from cocodc_jax.core.state import AppliedSync
from cocodc_jax.report.records import scalars
from cocodc_jax.train.records import Records, record_of, recorded_of

# Two regions, one layer, four experts, two a token.
LOADS = np.array([[[1.0, 1.0, 0, 0]], [[1.0, 0.5, 0.5, 0]]], np.float32)
AUX = {
    "router_balance": np.array([1.0, 2.0], np.float32),
    "router_z": np.array([3.0, 5.0], np.float32),
    "router_entropy": np.array([0.5, 0.5], np.float32),
    "expert_load": LOADS,
}


def test_a_record_has_the_balance_and_divergence_of_loads():
    record = record_of(7, AUX)
    assert record == {
        "kind": "experts",
        "step": 7,
        "balance": 1.5,
        "z": 4.0,
        "entropy": 0.5,
        "load_max": 1.0 * 4 / 2,
        "divergence": (0.5 + 0.5) / 2 / (2 * 2),
        "dead": 1.0,
        "load_regions": LOADS.tolist(),
    }

    shown = scalars(record)
    assert shown["experts/load_regions/region_1/layer_0/expert_1"] == 0.5
    assert shown["experts/dead"] == 1.0


def test_a_region_that_is_not_finite_leaves_numbers_that_are_json():
    worse = {
        name: np.where([[True], [False]], np.nan, AUX[name][:, None])
        for name in AUX
        if name != "expert_load"
    }
    record = record_of(7, AUX | worse)
    assert (record["balance"], record["z"], record["entropy"]) == (2.0, 5.0, 0.5)

    written = []
    records = Records(written.append, 10, lambda step: step)
    for ratio in (np.nan, 0.5):
        ratios = {"correction_ratio": jnp.array([ratio])}
        records.sync(AppliedSync(0, 1, 2, 3, jnp.ones(()), ratios))

    assert [row["correction_ratio"] for row in written] == [None, 0.5]
    assert records.correction_ratio == 0.5


def test_many_experts_are_recorded_without_their_single_loads():
    aux = AUX | {"expert_load": np.ones((2, 3, 100), np.float32)}
    assert "load_regions" not in record_of(7, aux)


def test_a_dense_model_has_no_routing():
    assert recorded_of({"accuracy": 1}) == {}
    assert recorded_of(AUX | {"accuracy": 1}) == AUX
