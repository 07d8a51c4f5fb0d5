"""The end of an attempt to train: a stop, a return to the others, or a rollback."""

import time
from unittest import mock

import pytest

from cocodc_jax.elastic.link import LeftBehindError
from cocodc_jax.run.attempt import Attempt
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.train.joining import Carried
from cocodc_jax.train.spikes import LossSpikeError, Spike

STEPS = PRESETS["smoke"].run.steps
CARRIED = Carried(mock.Mock(step=8))


def attempt(**fields):
    """An attempt that began with the batch at position 3 of its data."""
    made = Attempt(
        session=mock.Mock(config=PRESETS["smoke"]),
        stream=mock.Mock(),
        checkpoints=mock.Mock(latest_step=16),
        monitor=mock.Mock(),
        fault_watch=mock.Mock(),
        listener=mock.Mock(),
        **fields,
    )
    made.first_batch = 3
    return made


@pytest.mark.parametrize(
    ("carried", "own_step", "has_unsaved_work"),
    [
        (None, 0, False),  # A new region.
        (None, 8, False),  # Its checkpoint has all it did.
        (None, STEPS, True),  # Its summary is not written yet.
        (CARRIED, 8, True),
    ],
)
def test_only_a_region_with_unsaved_work_has_to_save(
    carried, own_step, has_unsaved_work
):
    first = attempt(carried=carried)
    first.own_step = own_step
    assert first.has_unsaved_work == has_unsaved_work


def test_an_attempt_that_only_saves_begins_where_the_one_before_did():
    first = attempt(carried=CARRIED, seconds=5.0)
    second = first.save_and_stop()
    first.stream.set_state.assert_called_once_with(3)
    assert second.is_stopping
    assert (second.carried, second.seconds) == (CARRIED, 5.0)


def test_a_region_rejoins_with_its_state_and_the_time_it_has_trained(capsys):
    error = LeftBehindError("the others went on")
    error.state = CARRIED
    first = attempt(seconds=5.0, began_step=0, began_s=100.0)
    first.entered_s = time.time() - 20

    second = first.rejoin(error)
    assert second.carried is CARRIED
    assert second.seconds == pytest.approx(25, abs=5)
    assert (second.began_step, second.began_s) == (0, 100.0)
    assert capsys.readouterr().err == "the others went on: coming back\n"
    message = "the others went on: coming back"
    first.monitor.notify.assert_called_once_with("region_lost", message)


def test_rollbacks_are_kept_for_the_summary(capsys):
    spike = Spike(18, 1, 9.0, 2.0, 8.0)
    first = attempt()
    second = first.roll_back(LossSpikeError([spike], 16))
    third = second.roll_back(LossSpikeError([spike], 16))
    assert [len(x.rollbacks) for x in (first, second, third)] == [0, 1, 2]
    assert second.rollbacks == [{**spike._asdict(), "to_step": 16}]
    error = capsys.readouterr().err
    assert error.count("the run returns to it, or else to its start, and") == 2
