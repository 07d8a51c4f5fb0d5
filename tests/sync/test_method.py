"""A method and its outer optimizer; parts that do not go together are refused."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.methods.noloco import noisy_pairs
from cocodc_jax.sync import merge
from cocodc_jax.sync.messages import AsIs, Compressed, Ranked
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.moments import Moments
from cocodc_jax.sync.outer import SharedOuter, nesterov, pseudo_gradient
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules import (
    RankedRounds,
    asynchronous,
    one_step_stale,
    ranked_rounds,
    staggered,
)
from cocodc_jax.sync.summed import ByRings
from cocodc_jax.transforms import compression

PAIRS = noisy_pairs(0.7, 0.5, 0.7, 0)
SHARED = nesterov(0.7, 0.9)
REMEMBERING = merge.remembering(merge.mix(0.5), 0.5)


def synced(**parts):
    whole = {"schedule": staggered(4), "outer": SHARED, "merge": merge.replace()}
    return Sync(**(whole | parts))


WEIGHS_NOT = "it has outer parameters in every region, and can neither weigh"
INT8 = compression.parse("int8")
RANKED = Ranked(lambda rank: INT8, lambda state, tree, r: state, 4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"schedule": "staggered"},
         r"^schedule='staggered' must be a part .* schedules.stag"),
        ({"outer": optax.sgd(0.7)},
         r"^outer=Gradient.* must be a part .* SharedOuter\(an Op"),
        ({"merge": "mix"}, r"^merge='mix' must be a part such as merge.replace\(\)"),
        ({"merge": merge.replace}, r"^merge=<function replace .* must be"),
        ({"message": compression.int8()},
         r"^message=Comp.* must be a part .* Compressed\(a "),
        ({"outer": PAIRS, "schedule": asynchronous(4)}, WEIGHS_NOT),
        ({"outer": PAIRS, "weigh": lambda steps, tokens: tokens}, WEIGHS_NOT),
        ({"outer": PAIRS, "merge": REMEMBERING}, WEIGHS_NOT),
        ({"outer": PAIRS, "schedule": dataclasses.replace(staggered(4),
                                                          participating=(0, 1))},
         WEIGHS_NOT),
        ({"outer": SharedOuter(optax.sgd(1.0), needs=frozenset({"stale_params"})),
          "schedule": asynchronous(4)}, r"^needs=\{'stale_params'\} is of one outer"),
        ({"merge": REMEMBERING, "schedule": one_step_stale(4)}, "send the same progr"),
        ({"moments": Moments(1, 1), "schedule": staggered(4, phase_steps=1)},
         "^sync_moments=1,1 goes with syncs of the whole model"),
        ({"outer": PAIRS, "message": ByRings(2)},
         "ByRings sums pseudo-gradients on their way, for one outer model, but it"),
    ],
)  # fmt: skip
def test_parts_of_another_kind_or_that_take_one_outer_model_are_named(parts, message):
    with pytest.raises(ValueError, match=message):
        synced(**parts)


def test_parts_have_defaults_that_do_nothing():
    mine = Method(name="mine", sync=synced())
    assert (mine.sync.message, mine.sync.weigh) == (AsIs(), None)
    assert (mine.needs, mine.num_fragments) == (frozenset(), 1)

    nothing = Method(name="nothing")
    assert (nothing.sync, nothing.per_step, nothing.schedule) == (None, None, None)
    assert (nothing.needs, nothing.num_fragments) == (frozenset(), 1)


def test_a_method_exchanges_at_every_step_or_from_time_to_time():
    per_step = methods.get("data_parallel").per_step
    with pytest.raises(ValueError, match="^method='mine' has a sync and exchanges at"):
        Method(name="mine", sync=synced(), per_step=per_step)


def test_a_method_needs_what_its_parts_need():
    method = Method(
        name="mine",
        sync=synced(
            schedule=methods.get("cocodc", transmission_score="drift").schedule,
            outer=SharedOuter(optax.sgd(1.0), needs=frozenset({"stale_params"})),
            merge=merge.compensate(optax.identity(), frozenset({"second_moment"})),
        ),
    )

    assert method.needs == {"drift", "stale_params", "staged", "second_moment"}
    assert method.sync.copies == {"staged", "stale_params"}


@pytest.mark.parametrize(
    ("schedule", "message"), [(ranked_rounds(4, 4, 1), AsIs()), (staggered(4), RANKED)]
)
def test_ranked_rounds_and_ranked_messages_need_each_other(schedule, message):
    with pytest.raises(
        ValueError,
        match=f"{type(schedule).__name__} and {type(message).__name__} do not go tog",
    ):
        synced(schedule=schedule, message=message)


def test_ranked_rounds_go_with_ranked_messages_and_need_an_effective_rank():
    assert isinstance(synced(schedule=ranked_rounds(4, 4, 1), message=RANKED), Sync)
    assert RankedRounds.needs == {"effective_rank"}


class TestCompressed:
    def test_the_compressor_is_replaced(self):
        method = methods.get("sparseloco").compressed(compression.int8())
        assert method.sync.message == Compressed(method.sync.message.by, "senders")
        assert method.sync.message.by.name == "int8"
        assert method.per_step is None

    def test_compressed_gradients_are_gathered(self):
        method = methods.get("data_parallel", compress="ef+topk:0.1")
        assert method.per_step.name == "compressed_gradients"
        assert method.per_step.receive is not None
        assert methods.get("data_parallel").per_step.receive is None
        assert methods.get("diloco", compress=None).sync.message == AsIs()

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("snoo", "a region alone sends nothing"),
            ("apart", "nothing is sent"),
            ("distributed_lion", "its messages are one bit a parameter"),
            ("multi_ring", "its rings pass on partial sums"),
            ("dilocox", "its rank follows the updates"),
            ("noloco", "its regions send their parameters, which are no change"),
        ],
    )
    def test_compression_is_refused_where_a_method_has_no_message(self, name, why):
        message = f"compress='int8' has no meaning for method='{name}': {why}"
        with pytest.raises(ValueError, match=message):
            methods.get(name, compress="int8")

    @pytest.mark.parametrize(
        ("name", "compress"),
        [
            ("demo", "ef+dct:32"),
            ("diloco_demo", "ef+topk:0.25"),
            ("lt_admm", "ef+topk:0.25"),
            ("lt_admm", "matrices(error_feedback(int4()))"),
            ("streaming_diloco", "error_feedback(error_feedback(int4()))"),
        ],
    )
    def test_a_second_error_feedback_is_refused(self, name, compress):
        with pytest.raises(ValueError, match="adds error feedback where there is one"):
            methods.get(name, compress=compress)


class TestWeighted:
    def test_weights_are_given_by_their_name(self):
        assert methods.get("diloco").sync.weigh is None
        assert methods.get("diloco", region_weights="tokens").sync.weigh(1, 5) == 5
        name = "decoupled_diloco"
        assert methods.get(name, region_weights="equal").sync.weigh is None
        assert methods.get(name).sync.weigh is not None

    @pytest.mark.parametrize(
        ("name", "weights", "message"),
        [
            ("apart", "tokens", "no meaning for method='apart': it takes no mean"),
            ("data_parallel", "tokens", "no meaning for method='data_parallel'"),
            ("heloco", "equal", "region_weights='equal' has no meaning for .*'heloco'"),
            ("noloco", "tokens", "'noloco': it has outer parameters in every region"),
        ],
    )
    def test_wrong_arguments_are_named(self, name, weights, message):
        with pytest.raises(ValueError, match=message):
            methods.get(name, region_weights=weights)


class TestPlaced:
    def test_the_outer_state_is_placed_where_the_argument_says(self):
        method = methods.get("diloco", outer_placement="divided")
        assert method.sync.outer.placement == "divided"
        assert methods.get("diloco").sync.outer.placement == "host"
        assert methods.get("co2").sync.outer.placement == "divided"
        assert methods.get("co2", outer_placement="host").sync.outer.placement == "host"

    @pytest.mark.parametrize("name", ["apart", "data_parallel", "noloco"])
    def test_outer_placement_host_is_allowed_without_an_outer_state(self, name):
        assert methods.get(name, outer_placement="host").name == name

    @pytest.mark.parametrize("name", ["apart", "data_parallel", "noloco", "eager"])
    def test_outer_placement_divided_is_refused_without_a_shared_outer_model(
        self, name
    ):
        with pytest.raises(
            ValueError,
            match=f"outer_placement='divided' has no meaning for method='{name}': it "
            "has no one outer model to divide; leave it out",
        ):
            methods.get(name, outer_placement="divided")


class TestBind:
    @pytest.mark.parametrize(
        ("name", "options", "step_times", "message"),
        [
            ("snoo", {}, (1.0, 1.0), "regions=2 must be 1 for method='snoo'"),
            ("demo", {}, (1.0, 2.0), r"step_times=\(1.0, 2.0\) must all be 1 for"),
            (
                "decoupled_diloco",
                {"answer_steps": "1,1,2,9"},
                (1.0, 1.0),
                "regions=2 must be 4 for method='decoupled_diloco' and its arguments",
            ),
        ],
    )
    def test_wrong_arguments_are_named(self, name, options, step_times, message):
        regions = Regions(step_times, (1,) * len(step_times))
        with pytest.raises(ValueError, match=message):
            methods.get(name, **options).bind(regions)

    def test_a_schedule_learns_the_clocks(self):
        regions = Regions((1.0, 2.0), (1, 1))
        method = methods.get("heloco").bind(regions)
        assert method.schedule.step_times == (1.0, 2.0)
        diloco = methods.get("diloco")
        apart = methods.get("apart")
        assert diloco.bind(regions).schedule == diloco.schedule
        assert apart.bind(regions) is apart

    def test_a_schedule_looks_midway_where_a_merge_compares_two_halves(self):
        regions = Regions.alike(2)
        method = methods.get("cocodc", curvature="secant").bind(regions)
        assert method.schedule.looks_midway
        assert not methods.get("cocodc").bind(regions).schedule.looks_midway


# --- Outer optimizers ---


@pytest.mark.parametrize(
    ("momentum", "expected"), [(0.5, [-0.75, -1.625]), (0.0, [-0.5, -1.0])]
)
def test_nesterov_by_hand(momentum, expected):
    """m <- mu m + D; x <- x - eta (D + mu m): with D = 1, 1, eta 0.5, mu 0.5.

    First m = 1, x = -0.75; then m = 1.5, x = -0.75 - 0.5 * 1.75.
    """
    optimizer = nesterov(0.5, momentum).optimizer
    x = jnp.float32(0)
    state = optimizer.init(x)
    path = []

    for _ in range(2):
        step, state = optimizer.update(jnp.float32(1), state, x)
        x = optax.apply_updates(x, step)
        path.append(float(x))

    assert path == expected


def test_a_pseudo_gradient_is_old_minus_new_in_the_outer_dtype():
    """1 + 1 / 512 is no bfloat16: the difference from 1 is kept."""
    params = {"w": jnp.array([1 + 1 / 512, 3.0], jnp.float32)}
    local = {"w": jnp.array([1.0, 5.0], jnp.bfloat16)}
    difference = pseudo_gradient(params, local)
    assert difference["w"].dtype == jnp.float32
    np.testing.assert_array_equal(difference["w"], [1 / 512, -2.0])


def test_a_divided_or_pairwise_outer_state_stays_in_the_program():
    assert SHARED.placed("divided") == dataclasses.replace(SHARED, placement="divided")
    assert SHARED.only_in_program is None
    assert "divided over the inner mesh" in SHARED.placed("divided").only_in_program
    assert PAIRS.placed("host") is PAIRS
    assert PAIRS.only_in_program == "each region has outer parameters of its own"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: merge.compensate("isotropic"),
            "^transform='isotropic' must be an optax.Grad",
        ),
        (lambda: PAIRS.placed("divided"), "it has no one outer model to divide"),
        (
            lambda: dataclasses.replace(PAIRS, group="trios"),
            r"group='trios' is unknown; use one of \('all', 'pairs', 'ring'\)",
        ),
        (lambda: nesterov(math.nan, 0.9), "outer_lr=nan must be positive and finite"),
        (lambda: nesterov(math.inf, 0.9), "outer_lr=inf must be positive and finite"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
