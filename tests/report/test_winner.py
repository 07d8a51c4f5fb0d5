"""A comparison's winner in a sentence."""

from cocodc_jax.report.comparison import compare
from cocodc_jax.report.winner import won
from tests.report.made_up import run


def test_methods_that_no_other_beats_at_their_bytes_win():
    runs = [run("data_parallel", end=1.2), run("diloco", end=1.6)]
    runs.append(run("cocodc", end=1.7, num_fragments=4))
    sentence = won(compare(runs))
    assert sentence.startswith("diloco (loss ")
    assert " and data_parallel (loss " in sentence
    assert "win at the bytes sent: every other method sends more" in sentence
    assert sentence.endswith("One seed gives no order between close losses.")


def test_if_less_loss_always_costs_more_bytes_none_wins():
    runs = [run(m, seed, end) for m, end in MORE_FOR_LESS for seed in range(2)]
    sentence = won(compare(runs))
    assert sentence.startswith("None of diloco (")
    assert "One seed" not in sentence


MORE_FOR_LESS = (("data_parallel", 1.2), ("diloco", 1.6))
