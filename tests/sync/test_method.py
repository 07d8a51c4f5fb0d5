"""A method as a value: parts that do not go together are refused, with the reason."""

import dataclasses

import optax
import pytest

from cocodc_jax.sync import merge, methods, outers, schedule
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.regional import RegionalOuter
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms import compression


def made(**parts):
    whole = {
        "name": "mine",
        "schedule": schedule.staggered(4),
        "merge": merge.replace(),
        "outer_optimizer": optax.sgd(1.0),
    }
    return Method(**(whole | parts))


PAIRS = outers.noisy_pairs(0.7, 0.5, 0.7, 0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"outer_placement": "attic"}, "outer_placement='attic' is unknown; use one"),
        (
            {"outer_placement": "divided", "outer_optimizer": PAIRS},
            "outer_placement='divided' has no meaning for method='mine'",
        ),
        (
            {"outer_placement": "divided", "schedule": None},
            "outer_placement='divided' has no meaning for method='mine'",
        ),
        *(
            (
                {"outer_optimizer": PAIRS, **part},
                "method='mine' has outer parameters in every region: it can neither",
            )
            for part in (
                {"is_asynchronous": True},
                {"needs_reference": True},
                {"weigh": lambda steps, tokens: tokens},
            )
        ),
        (
            {"is_asynchronous": True, "schedule": schedule.staggered(4, 1, 2)},
            "delay_steps=2 must be 0 for method='mine': a region that comes alone",
        ),
    ],
)
def test_parts_that_do_not_go_together(parts, message):
    with pytest.raises(ValueError, match=message):
        made(**parts)


def test_an_unknown_group():
    with pytest.raises(ValueError, match="group='trios' is unknown; use one of"):
        dataclasses.replace(PAIRS, group="trios")
    assert isinstance(PAIRS, RegionalOuter)


class TestCompressed:
    def test_the_compressor_is_replaced(self):
        method = methods.get("sparseloco").compressed(compression.int8())
        assert method.compressor.name == "int8"
        assert method.step_exchange is None

    def test_gradients_are_then_gathered(self):
        method = methods.get("data_parallel", compress="ef+topk:0.1")
        assert method.step_exchange.name == "compressed_gradients"
        assert method.step_exchange.receive is not None
        assert methods.get("data_parallel").step_exchange.receive is None

    def test_other_exchanges_stay(self):
        method = methods.get("demo", compress="int4")
        assert method.step_exchange.name == "decoupled_momentum"
        assert method.compressor.name == "int4"

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("snoo", "a region alone sends nothing"),
            ("apart", "nothing is sent"),
            ("distributed_lion", "its messages are one bit a parameter"),
        ],
    )
    def test_nothing_to_compress(self, name, why):
        with pytest.raises(
            ValueError,
            match=f"compress='int8' has no meaning for method='{name}': {why}",
        ):
            methods.get(name, compress="int8")


class TestWeighted:
    def test_by_name(self):
        assert methods.get("diloco").weigh is None
        assert methods.get("diloco", region_weights="tokens").weigh(1, 5) == 5
        assert methods.get("decoupled_diloco", region_weights="equal").weigh is None
        assert methods.get("decoupled_diloco").weigh is not None

    @pytest.mark.parametrize(
        ("name", "weights", "message"),
        [
            ("diloco", "size", "region_weights='size' is unknown; use 'equal' or"),
            ("apart", "tokens", "no meaning for method='apart', which takes no mean"),
            ("data_parallel", "tokens", "no meaning for method='data_parallel'"),
            ("heloco", "equal", "region_weights='equal' has no meaning for .*'heloco'"),
            ("noloco", "tokens", "'noloco' has outer parameters in every region"),
        ],
    )
    def test_errors(self, name, weights, message):
        with pytest.raises(ValueError, match=message):
            methods.get(name, region_weights=weights)


class TestForRegions:
    @pytest.mark.parametrize(
        ("name", "options", "step_times", "num_regions", "message"),
        [
            ("diloco", {}, (1.0, 1.0), 4, "regions=4, but step_times has 2 entries"),
            ("snoo", {}, (1.0, 1.0), 2, "regions=2 must be 1 for method='snoo'"),
            *(
                (name, {}, (1.0, 2.0), 2, r"step_times=\(1.0, 2.0\) must all be 1 for")
                for name in ("data_parallel", "demo", "distributed_lion")
            ),
            (
                "decoupled_diloco",
                {"answer_steps": "1,1,2,9"},
                (1.0, 1.0),
                2,
                r"taking_part=\(0, 1, 2\) names a region that is none of the 2",
            ),
        ],
    )
    def test_errors(self, name, options, step_times, num_regions, message):
        regions = Regions(step_times, (1,) * len(step_times))
        with pytest.raises(ValueError, match=message):
            methods.get(name, **options).for_regions(regions, num_regions)

    def test_a_schedule_learns_the_clocks(self):
        regions = Regions((1.0, 2.0), (1, 1))
        method = methods.get("heloco").for_regions(regions, 2)
        assert method.schedule.step_times == (1.0, 2.0)
        assert methods.get("diloco").for_regions(regions, 2).schedule == (
            methods.get("diloco").schedule
        )
        apart = methods.get("apart")
        assert apart.for_regions(regions, 2) is apart


class TestQuorum:
    """`decoupled_diloco`: when a fragment is merged, and from which regions."""

    @pytest.mark.parametrize(
        ("answers", "quorum", "grace", "delay", "taking_part"),
        [
            ("", 1, 2, 1, None),
            ("1,1,2,9", 1, 0, 1, (0, 1)),
            ("1,1,2,9", 1, 1, 2, (0, 1, 2)),
            ("1,1,2,9", 3, 0, 2, (0, 1, 2)),
            ("1,1,2,9", 3, 50, 9, (0, 1, 2, 3)),  # Not longer than for all.
            ("9,0,3", 2, 0, 3, (1, 2)),
            ("0,0", 2, 5, 0, (0, 1)),
        ],
    )
    def test_by_hand(self, answers, quorum, grace, delay, taking_part):
        method = methods.get(
            "decoupled_diloco", answer_steps=answers, quorum=quorum, grace_steps=grace
        )
        assert method.schedule.delay_steps == delay
        assert method.schedule.taking_part == taking_part
        state, event = method.schedule.start(method.schedule.init(), 25)
        assert event.regions == taking_part

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"grace_steps": -1}, "grace_steps=-1 must be at least 0"),
            ({"quorum": 0}, "quorum=0 must be at least 1"),
            (
                {"answer_steps": "1,2", "quorum": 3},
                "quorum=3 must .* at most the 2 reg",
            ),
            ({"answer_steps": "1,2", "quorum": 0}, "quorum=0 must be at least 1 and"),
            ({"answer_steps": "1,x"}, "answer_steps='1,x' must be numbers of steps"),
            ({"answer_steps": "1,-2"}, "answer_steps='1,-2' must be numbers of steps"),
            ({"answer_steps": "200"}, "delay_steps=200 is longer than sync_interval"),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises(ValueError, match=message):
            methods.get("decoupled_diloco", **options)

    def test_weights_are_tokens_times_tokens_per_step(self):
        """4 steps of 2 sequences against 2 steps of 4; and a region that did none."""
        method = methods.get("decoupled_diloco")
        regions = Regions((1.0, 2.0, 5.0), (2, 4, 1))
        weights = regions.weights(0, 4, method.weigh)
        assert weights.tolist() == [16 / 48, 32 / 48, 0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "diloco_demo",
            {"outer_momentum": 1.0},
            "outer_momentum=1.0 must be at least 0",
        ),
        ("demo", {"momentum_decay": 1.0}, "momentum_decay=1.0 must be at least 0"),
        ("distributed_lion", {"lion_beta1": 1.0}, "lion_beta1=1.0 must be at least 0"),
        ("distributed_lion", {"lion_beta2": -1.0}, "lion_beta2=-1.0 must be at least"),
        ("distributed_lion", {"lion_vote": "veto"}, "lion_vote='veto' is unknown; use"),
        ("sparseloco", {"compress": "zip"}, "compress='zip': 'zip' is not one of"),
        ("diloco", {"outer_placement": "attic"}, "outer_placement='attic' is unknown"),
        ("co2", {"momentum_clip": 0.0}, "max_abs=0.0 must be positive"),
    ],
)
def test_a_methods_own_numbers(name, options, message):
    with pytest.raises(ValueError, match=message):
        methods.get(name, **options)
