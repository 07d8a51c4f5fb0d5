import pytest

from cocodc_jax.network.syncs import AUTO, METHODS, Schedule


def starts(schedule, num_steps):
    """(step, fragments) of every start when nothing is ever in flight for long."""
    last = [-1] * schedule.num_fragments
    out = []
    for step in range(1, num_steps + 1):
        if not schedule.is_start(step):
            continue
        for fragments in schedule.starts(step, (), last):
            out.append((step, fragments))
            for p in fragments:
                last[p] = step
    return out


def test_data_parallel_sends_everything_every_step():
    found = starts(Schedule("data_parallel", num_fragments=2), 3)
    assert found == [(1, (0, 1)), (2, (0, 1)), (3, (0, 1))]


def test_diloco_sends_everything_every_interval():
    assert starts(Schedule("diloco", 2, 4), 9) == [(4, (0, 1)), (8, (0, 1))]


def test_streaming_offsets():
    # floor(p 8 / 3): 0, 2, 5.
    found = starts(Schedule("streaming_diloco", 3, 8, 1), 13)
    assert found == [(2, (1,)), (5, (2,)), (8, (0,)), (10, (1,)), (13, (2,))]


def test_cocodc_sends_the_one_that_waited_longest():
    schedule = Schedule("cocodc", 2, 9, 1, syncs_per_interval=3)
    assert starts(schedule, 9) == [(3, (0,)), (6, (1,)), (9, (0,))]


def test_cocodc_never_sends_a_fragment_in_flight():
    schedule = Schedule("cocodc", 2, 8, 1)
    assert schedule.starts(4, {0}, [0, 2]) == [(1,)]
    assert schedule.starts(4, {0, 1}, [0, 2]) == []


@pytest.mark.parametrize("num_syncs", [4, 7, 20])
def test_cocodc_sends_each_fragment_within_an_interval(num_syncs):
    schedule = Schedule("cocodc", 4, 20, 0, syncs_per_interval=num_syncs)
    found = starts(schedule, 200)
    for p in range(4):
        steps = [0] + [step for step, fragments in found if fragments == (p,)]
        assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 20


def test_longest_delay():
    assert Schedule("streaming_diloco", 2, 8, 3).max_delay == 3
    assert Schedule("streaming_diloco", 2, 8, AUTO).max_delay == 7
    assert Schedule("streaming_diloco", 2, 8, AUTO, max_delay_steps=5).max_delay == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gossip",), f"method='gossip' must be one of .*{METHODS[0]}"),
        (("diloco", 0), "num_fragments=0 must be at least 1"),
        (("data_parallel", 1, 2), "sync_interval=2 must be 1 for data_parallel"),
        (("diloco", 1, 2, 1), "delay_steps=1 must be 0 for diloco"),
        (
            ("cocodc", 1, 5, 5),
            "delay_steps=5 must be at least 0 and below sync_interval",
        ),
        (
            ("cocodc", 1, 5, AUTO, 1, 5),
            "max_delay_steps=5 must be at least 0 and below",
        ),
        (("cocodc", 1, 5, "soon"), "delay_steps='soon' must be a number or 'auto'"),
        (
            ("streaming_diloco", 6, 5),
            "num_fragments=6 must not be above sync_interval=5",
        ),
        (("cocodc", 2, 5, 1, 6), "syncs_per_interval=6 must be between"),
        (("cocodc", 2, 5, 1, 1), "syncs_per_interval=1 must be between"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule(*arguments)
