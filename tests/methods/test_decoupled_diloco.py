"""Decoupled DiLoCo: when a fragment is merged, from which regions, at which weights."""

import pytest

from cocodc_jax import methods
from cocodc_jax.sync.regions import Regions


class TestQuorum:
    """`decoupled_diloco`: when a fragment is merged, and from which regions."""

    @pytest.mark.parametrize(
        ("answers", "quorum", "grace", "delay", "participating"),
        [
            ("", 1, 2, 7, None),
            ("1,1,2,9", 1, 0, 1, (0, 1)),
            ("1,1,2,9", 1, 1, 2, (0, 1, 2)),
            ("1,1,2,9", 3, 0, 2, (0, 1, 2)),
            ("1,1,2,9", 3, 50, 9, (0, 1, 2, 3)),  # Not longer than for all.
            ("9,0,3", 2, 0, 3, (1, 2)),
            ("0,0", 2, 5, 0, (0, 1)),
        ],
    )
    def test_by_hand(self, answers, quorum, grace, delay, participating):
        method = methods.get(
            "decoupled_diloco", answer_steps=answers, quorum=quorum, grace_steps=grace,
            sync_interval=100, num_fragments=4, delay_steps=7,
        )  # fmt: skip
        assert method.schedule.delay_steps == delay
        assert method.schedule.participating == participating
        _, event = method.schedule.next_event(method.schedule.init(), 25)
        assert event.participating == participating

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"grace_steps": -1}, "grace_steps=-1 must be at least 0"),
            ({"quorum": 0}, "quorum=0 must be at least 1"),
            (
                {"answer_steps": "1,2", "quorum": 3},
                "quorum=3 must .* at most the 2 reg",
            ),
            ({"answer_steps": "1,2", "quorum": 0}, "quorum=0 must be at least 1"),
            ({"quorum": 2.5}, "quorum=2.5 must be a whole number"),
            ({"answer_steps": "1,x"}, "answer_steps='1,x' must be numbers of steps"),
            ({"answer_steps": "1,-2"}, "answer_steps='1,-2' must be numbers of steps"),
            ({"answer_steps": "200"}, "delay_steps=200 is longer than sync_interval"),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises(ValueError, match=message):
            methods.get("decoupled_diloco", **options)

    def test_a_quorum_is_among_the_regions(self):
        method = methods.get("decoupled_diloco", quorum=3)
        method.bind(Regions.alike(3))
        message = "regions=2 must be at least 3 for method='decoupled_diloco'"
        with pytest.raises(ValueError, match=message):
            method.bind(Regions.alike(2))

    def test_weights_are_tokens_times_tokens_per_step(self):
        """4 steps of 2 sequences against 2 steps of 4; and a region that did none."""
        method = methods.get("decoupled_diloco")
        regions = Regions((1.0, 2.0, 5.0), (2, 4, 1))
        weights = regions.weights(0, 4, method.sync.weigh)
        assert weights.tolist() == [16 / 48, 32 / 48, 0]
