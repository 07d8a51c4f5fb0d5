"""Needs: the copies they keep, their values, and refused ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.methods import METHODS
from cocodc_jax.sync import needs
from cocodc_jax.sync.needs import HALFWAY, NEEDS, STAGED, STALE, Need, UserInputs
from cocodc_jax.transforms import curvature


def make_seen(**parts):
    """One region with one parameter, theta^2 times the batch as its loss."""
    defaults = {
        "local": {"w": jnp.array([1.0])},
        "outer": {"w": jnp.array([2.0])},
        "kept": {STAGED: {"w": jnp.array([10.0])}, HALFWAY: {"w": jnp.array([4.0])}},
        "delay_steps": 5,
        "regional": {"second_moment": {"w": jnp.array([0.25])}},
        "learning_rate": jnp.float32(0.5),
        "batch": jnp.float32(3.0),
        "key": jax.random.key(7),
        "whole": lambda part: {"v": jnp.array([0.0]), **part},
        "loss_fn": lambda p, batch, key: (batch * jnp.sum(p["w"] ** 2), {}),
        "user_inputs": UserInputs(
            outputs=(lambda p, batch: p["w"] * batch, lambda out, batch: out.sum())
        ),
    }

    return needs.MergeContext(**(defaults | parts))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


# --- The table ------------------------------------------------------------------


def test_every_need_of_a_method_is_in_the_table():
    named = set().union(*(make().needs for make in METHODS.values()))
    named |= set().union(*(curvature.get(name).needs for name in curvature.NAMES))
    # What `compensate` gives by itself is no need.
    assert named - {"delay_steps"} <= set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_every_entry_of_the_table_is_described(name):
    need = NEEDS[name]
    assert need.about.endswith(".")
    assert set(need.keeps) <= {STAGED, HALFWAY, STALE}
    if need.given_by:
        assert hasattr(UserInputs(), need.given_by[0])
    if need.of_regions:
        assert need.of_region is not None


def test_an_unknown_need_is_refused():
    message = r"merge 'odd' needs \['luck'\], .*; known are \['distance', 'drift', "
    with pytest.raises(ValueError, match=message):
        needs.check({"luck", "staged"}, UserInputs(), "merge 'odd'")


@pytest.mark.parametrize(
    ("need", "what"),
    [
        ("learning_rate", r"UserInputs\(learning_rate=, the inner optimizer's\)"),
        ("second_moment", r"UserInputs\(second_moment=adam_second_moment\(b2\) with"),
        ("model_fn", r"UserInputs\(outputs=\(model, loss\)\)"),
        ("output_loss_fn", r"UserInputs\(outputs=\(model, loss\)\)"),
    ],
)
def test_a_missing_input_of_the_user_is_named(need, what):
    with pytest.raises(ValueError, match=f"its merge needs '{need}': pass {what}"):
        needs.check({need}, UserInputs(), "its merge")


def test_user_inputs_satisfy_their_needs():
    everything = UserInputs(0.1, lambda state: state, (len, len))
    needs.check(NEEDS, everything, "all")
    needs.check((), UserInputs(), "nothing")


@pytest.mark.parametrize(
    ("of", "copies", "batch", "key"),
    [
        ((), set(), False, False),
        (("staged", "learning_rate"), {STAGED}, False, False),
        (("later_params",), {STAGED, HALFWAY}, False, False),
        (("later_gradient", "key"), {STAGED, HALFWAY}, False, True),
        (("stale_params",), {STALE}, False, False),
        (("gradient_fn",), set(), True, True),
        (("model_fn", "second_moment"), set(), True, True),
        (("norm", "times", "drift", "effective_rank"), set(), False, False),
    ],
)
def test_needs_give_the_copies_batches_and_keys_of_the_runtime(of, copies, batch, key):
    assert needs.copies(of) == copies
    assert needs.wants_batch(of) == batch
    assert needs.wants_key(of) == key


# --- What a merge is given --------------------------------------------------------


def test_staged_parameters_are_no_extra_argument():
    assert needs.arguments({"staged"}, make_seen()) == {}


def test_arguments_of_a_merge_by_hand():
    of = {"learning_rate", "second_moment", "key", "later_params"}
    values = needs.arguments(of, make_seen())
    assert set(values) == of
    assert values["learning_rate"] == 0.5
    assert values["second_moment"]["w"] == 0.25
    assert values["later_params"]["w"] == 4
    assert values["key"] == jax.random.key(7)


def test_needs_give_the_loss_as_functions_of_a_fragment():
    """3 theta^2 has the gradient 6 theta; the model is 3 theta."""
    values = needs.arguments({"gradient_fn", "model_fn", "output_loss_fn"}, make_seen())
    part = {"w": jnp.array([2.0])}
    close(values["gradient_fn"](part)["w"], [12.0])
    close(values["model_fn"](part), [6.0])
    close(values["output_loss_fn"](jnp.array([1.0, 5.0])), 6.0)


def test_the_gradients_of_two_halves_of_an_overlap_by_hand():
    """In numbers: one tensor moves by 6 in 2 steps, then by 3 in 3 steps."""
    values = needs.arguments({"later_gradient", "later_params"}, make_seen())
    # 9 / 5 overall, plus the change from 6 / 2 to 3 / 3.
    close(values["later_gradient"]["w"], [1.8 + 1.0 - 3.0])
    assert values["later_params"]["w"] == 4.0


def test_the_second_moment_is_made_from_all_regions():
    user_inputs = UserInputs(second_moment=lambda state: state["nu"])
    state = {"nu": jnp.ones((2, 3)), "mu": jnp.zeros((2, 3))}
    made = needs.regional({"second_moment", "staged"}, state, user_inputs)
    assert set(made) == {"second_moment"}
    assert made["second_moment"] is state["nu"]


def test_the_rate_is_of_the_step_just_done():
    assert UserInputs(learning_rate=0.5).rate(3) == 0.5
    assert UserInputs(learning_rate=lambda step: 10.0 * step).rate(3) == 20
    assert UserInputs(learning_rate=lambda step: 10.0 * step).rate(0) == 0


# --- Of a mean --------------------------------------------------------------------


def test_effective_rank_counts_parameters():
    """exp of the entropy of the singular values, each tensor by its size."""
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(6, 4)), "b": rng.normal(size=8), "c": np.zeros(2)}
    values = np.linalg.svd(tree["a"], compute_uv=False)
    p = values / values.sum()
    expected = (24 * np.exp(-np.sum(p * np.log(p))) + 8 + 2) / 34

    tree = jax.tree.map(lambda x: x.astype(np.float32), tree)
    actual = jax.jit(lambda mean: needs.of_mean(NEEDS, mean))(tree)
    assert set(actual) == {"effective_rank"}
    # A dozen roundings of float32.
    np.testing.assert_allclose(actual["effective_rank"], expected, rtol=1e-6)


# --- A new one ----------------------------------------------------------------------


def test_a_new_need_of_a_mean_is_one_entry(monkeypatch):
    largest = Need("The largest.", of_mean=lambda mean: jnp.max(jnp.abs(mean["w"])))
    monkeypatch.setitem(NEEDS, "largest", largest)
    mean = {"w": jnp.array([1.0, -3.0])}
    assert needs.of_mean({"largest", "norm"}, mean) == {"largest": 3.0}
