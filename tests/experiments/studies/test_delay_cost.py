"""What a delay costs: by hand where gradients do not depend on the parameters."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.sync.needs import UserInputs
from experiments.studies import delay_cost, recovery
from experiments.studies.recovery import REGIONS, Settings

SEEDS, STEPS, H = 2, 14, 4
LR, OUTER_LR, MU = 0.1, 0.5, 0.9
DRAWN = np.random.default_rng(0).normal(size=(STEPS, SEEDS, REGIONS, 5))
SETTINGS = Settings(steps=STEPS, sync_interval=H, seeds=SEEDS, outer_lr=OUTER_LR)
RUN = (f"--steps={STEPS}", f"--sync_interval={H}", "--seeds=2")


@pytest.fixture
def linear(monkeypatch):
    """A loss whose gradient is the batch: what a region does depends on no other."""

    def loss_fn(params, batch, key):
        return jnp.sum(params["w"] * batch), {}

    inner, user_inputs = optax.sgd(LR, 0.0), UserInputs(lambda step: LR)

    def tokens(settings, seed):
        return DRAWN[:, seed].astype(np.float32)

    for name, value in {
        "parts": lambda settings: (loss_fn, inner, user_inputs),
        "init_params": lambda settings: {"w": jnp.ones((SEEDS, 5))},
        "tokens": tokens,
        "eval_tokens": lambda settings: jnp.arange(5.0)[None],
    }.items():
        monkeypatch.setattr(recovery, name, value)


def by_hand(alpha, strength, tau, syncs):
    """Distances at each sync, in NumPy: `[S, E]` of doing nothing, mix, isotropic."""
    theta = np.ones((SEEDS, REGIONS, 5))
    outer, velocity = np.ones((SEEDS, 5)), np.zeros((SEEDS, 5))
    found, now = [], 0
    for sync in syncs:
        staged = theta - LR * DRAWN[now:sync].sum(0)
        delta = outer - staged.mean(1)
        velocity = MU * velocity + delta
        outer = outer - OUTER_LR * (delta + MU * velocity)
        progress = -LR * DRAWN[sync : sync + tau].sum(0)
        late, target = staged + progress, outer[:, None] + progress
        mixed = alpha * late + (1 - alpha) * outer[:, None]
        pulled = outer[:, None] + progress - strength * (outer[:, None] - staged)
        gap = ((outer[:, None] - staged) ** 2).sum((1, 2))
        apart = [((x - target) ** 2).sum((1, 2)) for x in (late, mixed, pulled)]
        found.append([*apart, gap])
        theta, now = target, sync + tau
    return np.array(found).transpose(1, 0, 2)


@pytest.mark.parametrize(("tau", "syncs"), [(2, [4, 8, 12]), (H, [4, 8])])
def test_distances_are_those_by_hand(linear, tau, syncs):
    """A delay of H ends in the step of the next sync."""
    found = recovery.measure(SETTINGS, tau, ["mix_0.25", "isotropic"])
    late, mixed, pulled, gap = by_hand(0.25, 0.3, tau, syncs)
    assert found.steps == syncs
    np.testing.assert_allclose(found.cost, np.sqrt(late / gap), rtol=1e-5)
    got = found.recovered
    np.testing.assert_allclose(got["mix_0.25", None], 1 - mixed / late, rtol=1e-4)
    np.testing.assert_allclose(got["isotropic", 0.3], 1 - pulled / late, rtol=1e-4)
    # Nothing that a region does depends on where it is: replay gets all back.
    np.testing.assert_allclose(found.cost, 1, rtol=1e-5)
    np.testing.assert_allclose(got["replay", None], 1, atol=1e-6)
    np.testing.assert_allclose(got["isotropic", 0.5], 1 - 0.5**2, rtol=1e-4)
    np.testing.assert_allclose(found.loss["replay", None], 0, atol=1e-5)


def test_the_command_writes_and_draws(linear, call, tmp_path):
    flags = [f"--workdir={tmp_path}", "--delays=1,2", "--rules=mix_0.5"]
    out, err = call(delay_cost, *flags, *RUN)
    assert not err
    rows = json.loads((tmp_path / "delay_cost.json").read_text())["rows"]
    assert [(row["delay_steps"], row["rule"]) for row in rows] == [
        (delay, rule) for delay in (1, 2) for rule in ("keep", "replay", "mix_0.5")
    ]
    assert rows[1]["recovered"]["mean"] == pytest.approx(1)
    assert "tau/H = 0.5" in out
    assert (tmp_path / "delay_cost.png").read_bytes().startswith(b"\x89PNG")


def test_a_delay_counts_once_and_what_is_left_out_is_told(linear, call, tmp_path):
    flags = [f"--workdir={tmp_path}", "--delays=1,1", "--rules=secant,mix_0.5"]
    out, err = call(delay_cost, *flags, *RUN)
    assert not err
    assert out.count("tau/H") == 1
    assert "Not at a delay of 1, as they need a longer one: secant\n" in out


def test_what_another_command_measured_is_kept(linear, call, refused, tmp_path):
    flags = [f"--workdir={tmp_path}", "--delays=1", "--rules=mix_0.5", *RUN]
    call(delay_cost, *flags)
    before = (tmp_path / "delay_cost.json").read_bytes()
    said = refused(delay_cost, *flags, "--outer_lr=0.5")
    assert "holds what another command measured" in said
    assert (tmp_path / "delay_cost.json").read_bytes() == before
    call(delay_cost, *flags)


def test_what_diverges_costs_no_other_number_and_what_is_done_is_kept(
    call, monkeypatch, tmp_path
):
    good, bad = np.full((2, 1), 0.5), np.array([[0.5], [np.nan]])

    asked, stops = [], [True, False]

    def measure(settings, delay, *_):
        asked.append(delay)
        if delay == 2 and stops.pop(0):
            raise KeyboardInterrupt
        rules = {("replay", None): good, ("mix_0.5", None): bad}
        loss = rules | {(recovery.KEEP, None): good}
        return recovery.Recovery([4, 8], good, good, rules, loss)

    monkeypatch.setattr(recovery, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        call(delay_cost, f"--workdir={tmp_path}", "--delays=1,2", "--seeds=1")
    kept = json.loads((tmp_path / "delay_cost.json").read_text())["rows"]
    assert [(row["rule"], row["delay_steps"]) for row in kept] == [
        ("keep", 1), ("replay", 1), ("mix_0.5", 1)
    ]  # fmt: skip
    assert kept[1]["recovered"] == {"mean": 0.5, "half": None}
    assert (kept[2]["recovered"], kept[2]["recovered_at"]) == (None, [0.5, None])
    assert "NaN" not in (tmp_path / "delay_cost.json").read_text()
    # The same command goes on.
    words = f"--workdir={tmp_path}", "--delays=1,2", "--seeds=1"
    call(delay_cost, *words)
    assert asked == [1, 2, 2]
    rows = json.loads((tmp_path / "delay_cost.json").read_text())["rows"]
    assert rows[:3] == kept
    assert [row["delay_steps"] for row in rows] == [1, 1, 1, 2, 2, 2]


def test_strengths_fall_with_the_delay_where_they_say_so():
    table = recovery.rules(20)
    assert table["isotropic"].strengths_at(10) == table["isotropic"].strengths
    one, ten = (table["outer_product"].strengths_at(tau) for tau in (1, 10))
    np.testing.assert_allclose(np.array(one) / 10, ten)


@pytest.mark.parametrize(("flag", "message"), [
    ("--delays=", "--delays=() is empty; name at least one"),
    ("--delays=21", "--delays=21 must be at least 1 and at most sync_interval=20"),
    ("--rules=best", "--rules='best' is unknown; use some of ['adam_second_mom"),
    ("--rules=mix_0,mix_0", "--rules=mix_0,mix_0 names one twice"),
    ("--delays=x", "--delays=x must be whole numbers separated by commas"),
    ("--seeds=0", "--seeds=0 must be at least 1"),
    ("--seeds=-1", "--seeds=-1 must be at least 1"),
    ("--outer_lr=nan", "--outer_lr=nan must be positive and finite"),
    ("--sync_interval=0", "--sync_interval=0 must be at least 1"),
    ("--steps=30", "--steps=30 must be at least two sync intervals of 20"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line(refused, tmp_path, flag, message):
    assert refused(delay_cost, f"--workdir={tmp_path}", flag).startswith(message)
