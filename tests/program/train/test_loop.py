"""The loop: the records it writes and when, and that it does not change the run."""

import contextlib
import dataclasses
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.core.state import AppliedSync, TrainState
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.region_program import Output
from cocodc_jax.train import loop
from cocodc_jax.train.checkpoint import Checkpoints, steps_in
from cocodc_jax.train.clock import FlightRecorder
from cocodc_jax.train.evaluate import make_evaluate
from cocodc_jax.train.finite import FiniteWatch, NonFiniteLossError
from cocodc_jax.train.hooks import NO_HOOKS, Cadence, Hooks
from cocodc_jax.train.loop import train
from cocodc_jax.train.records import Records
from cocodc_jax.train.run_steps import MAX_SCAN_STEPS


def tokens_at(step):
    return 16 * step


class Run:
    """One call of `train`, with everything that its hooks received."""

    def __init__(
        self, tiny, program, num_steps, folder=None, stop=None, batches=None, **options
    ):
        self.records = []
        self.clocks = []
        self.stopping = []
        state = tiny.start(program)
        progress = None
        cadence = Cadence(**{"log_every": 3, **options.pop("cadence", {})})
        with Checkpoints(folder) if folder else contextlib.nullcontext() as checkpoints:
            if checkpoints and (restored := checkpoints.restore(program)):
                state, extra = restored
                progress = extra["progress"]
                self.offset = extra["num_records"]

            hooks = Hooks(
                record=self.records.append,
                clock=self.clocks.append,
                snapshot=lambda x: {"progress": x, "num_records": len(self.records)},
                should_stop=stop or (lambda: False),
                stopping=lambda: self.stopping.append(checkpoints.latest_step),
            )
            self.result = train(
                program,
                state,
                batches or tiny.stream(state.step),
                num_steps,
                tokens_at,
                cadence=cadence,
                hooks=hooks,
                checkpoints=checkpoints,
                progress=progress,
                **options,
            )

    def of_kind(self, kind):
        return [record for record in self.records if record["kind"] == kind]


@pytest.fixture(scope="module")
def evaluate(tiny):
    """One evaluation for all methods: it holds only compiled code and batches."""
    mesh = tiny.shared_program("diloco").mesh
    return make_evaluate(tiny.loss_fn, mesh, tiny.make_batch(99))


def test_one_program_leaves_records_and_timeline_as_they_are(tiny, tmp_path):
    """Evaluations and checkpoints cut the steps, some of them where a fragment starts.

    Norms to rounding, see `test_segment.py`.
    """
    mesh = make_mesh(tiny.NUM_REGIONS, devices=jax.devices()[:4])
    evaluate = make_evaluate(tiny.loss_fn, mesh, tiny.make_batch(99))
    runs = []

    for overlap in ("no", "yes"):
        program = tiny.make_program(
            "streaming_diloco", mesh, transport=Transport("program", overlap=overlap)
        )

        run = Run(
            tiny,
            program,
            13,
            folder=tmp_path / overlap,
            evaluate=evaluate,
            cadence={"eval_every": 3, "checkpoint_every": 4},
        )

        norms = [r.pop("pseudo_gradient_norm") for r in run.of_kind("sync")]
        flights = run.result.timeline["syncs"]
        names = ("fragment", "start_step", "apply_step", "num_bytes")
        flights = [[flight[name] for name in names] for flight in flights]
        clocks = {(c.step, c.in_flight, c.bytes_sent) for c in run.clocks}
        runs.append((run.records, sorted(flights), clocks, norms))

    (*plain, seen, norms), (*fused, sometimes, others) = runs
    assert plain == fused
    assert sometimes == seen
    assert len(norms) == 4
    np.testing.assert_allclose(norms, others, rtol=1e-6)


class TestRecords:
    def test_records_have_the_order_and_content_by_hand(self, tiny, evaluate):
        """Streaming, worked by hand: starts at 2 (fragment 1), 4 (0), 6 (1), 8 (0)."""
        program = tiny.shared_program("streaming_diloco")
        cadence = {"log_every": 2, "eval_every": 6}
        run = Run(tiny, program, 9, cadence=cadence, evaluate=evaluate)
        assert [(r["kind"], r["step"]) for r in run.records] == [
            ("train", 2),
            ("train", 4),
            ("train", 6),
            ("sync", 6),
            ("eval", 6),
            ("train", 8),
            ("sync", 8),
            ("eval", 9),  # And at the end.
        ]

        fragments = program.fragments.num_bytes
        first, second = run.of_kind("sync")
        names = ("fragment", "start_step", "apply_step")
        assert [first[name] for name in names] == [1, 2, 6]
        assert [second[name] for name in names] == [0, 4, 8]
        assert [first["bytes"], second["bytes"]] == [fragments[1], fragments[0]]
        assert first["pseudo_gradient_norm"] > 0
        assert first["correction_ratio"] is None

        sent = [r["bytes_sent_per_region"] for r in run.of_kind("train")]
        both = sum(fragments)
        assert sent == [fragments[1], both, both + fragments[1], 2 * both]

        tokens = [r["tokens"] for r in run.records if r["kind"] != "sync"]
        assert tokens == list(map(tokens_at, (2, 4, 6, 6, 8, 9)))

    def test_metrics_of_a_merge_rule_are_recorded_under_its_prefix(self):
        written = []
        records = Records(written.append, log_every=10, tokens_at=lambda step: step)
        metrics = {
            "scale": jnp.array([0.25, 0.75]),
            "correction_ratio": jnp.array([0.5, 0.5]),
        }
        records.sync(AppliedSync(0, 1, 2, 3, jnp.ones(()), metrics))

        (record,) = written
        assert record["merge_scale"] == 0.5
        assert record["correction_ratio"] == 0.5

    def test_records_are_those_of_the_plain_run(self, tiny, method_name, evaluate):
        program = tiny.shared_program(method_name)
        _, outputs = tiny.finish(program, tiny.start(program), 12)
        losses = np.concatenate([np.asarray(o.losses) for o in outputs])
        syncs = [sync for output in outputs for sync in output.syncs]
        run = Run(tiny, program, 12, cadence={"eval_every": 4}, evaluate=evaluate)

        for i, record in enumerate(run.of_kind("train")):
            window = losses[3 * i : 3 * i + 3].astype(np.float64)
            assert record["step"] == 3 * i + 3
            assert record["loss_regions"] == window.mean(axis=0).tolist()
            np.testing.assert_allclose(record["loss"], window.mean(), rtol=1e-12)

        assert len(run.of_kind("train")) == 4
        for sync, record in zip(syncs, run.of_kind("sync"), strict=True):
            assert record["pseudo_gradient_norm"] == float(sync.norm)
            ratio = record["correction_ratio"]
            for values in sync.metrics.values():
                assert ratio == np.asarray(values).mean(dtype=np.float64)
            assert (ratio is None) == (not sync.metrics)

        ratios = [r["correction_ratio"] for r in run.of_kind("sync")]
        has_ratios = "cocodc" in method_name
        assert run.result.correction_ratio == (np.mean(ratios) if has_ratios else None)

    def test_the_mean_and_the_outer_model_are_evaluated(self, tiny, evaluate):
        program = tiny.shared_program("streaming_diloco")
        run = Run(tiny, program, 8, cadence={"eval_every": 5}, evaluate=evaluate)
        state, _ = tiny.finish(program, tiny.start(program), 5)

        first, last = run.of_kind("eval")
        assert first["eval_loss"] == float(evaluate(program.mean_params(state)))
        assert first["eval_loss_outer"] == float(evaluate(program.outer_params(state)))
        assert first["eval_loss"] != first["eval_loss_outer"]
        assert first["eval_perplexity"] == math.exp(first["eval_loss"])

        assert last["step"] == 8
        assert run.result.last_eval == last

    def test_an_outer_model_equal_to_the_mean_is_not_evaluated_again(
        self, tiny, evaluate
    ):
        """With H 2 there is a sync at steps 4 and 8; step 5 is one after a sync."""
        program = tiny.shared_program("diloco")
        judged = []

        def count(params):
            judged.append(params)
            return evaluate(params)

        numbers = {}
        for every, calls in ((4, 2), (5, 3)):  # At 4 and 8; at 5 and 8.
            run = Run(tiny, program, 8, cadence={"eval_every": every}, evaluate=count)
            assert len(judged) == calls
            judged.clear()
            for record in run.of_kind("eval"):
                numbers[record["step"]] = record

        for step, record in numbers.items():
            state, _ = tiny.finish(program, tiny.start(program), step)
            outer = float(evaluate(program.outer_params(state)))
            assert record["eval_loss_outer"] == outer
            assert (record["eval_loss"] == outer) == (step != 5)

    def test_every_step_is_on_the_clock_once(self, tiny):
        run = Run(tiny, tiny.shared_program("streaming_diloco"), 9)
        clocks = run.clocks

        assert [clock.step for clock in clocks] == [2, 4, 6, 8, 9]
        assert [clock.in_flight for clock in clocks] == [1, 2, 2, 2, 2]

        assert clocks[-1].bytes_sent == run.result.state.bytes_sent
        assert all(a.wall_s < b.wall_s for a, b in itertools.pairwise(clocks))
        assert all(clock.tokens_per_second > 0 for clock in clocks)

        assert run.result.stall_seconds >= 0
        assert run.result.seconds >= clocks[-1].wall_s


class TestCadence:
    @pytest.mark.parametrize(
        "cadence",
        [
            {"log_every": 1},
            {"log_every": 5, "eval_every": 7, "checkpoint_every": 3},
            pytest.param(
                {"log_every": 100, "checkpoint_every": 1}, marks=pytest.mark.slow
            ),
        ],
    )
    def test_the_loop_trains_what_bare_calls_of_the_program_do(
        self, tiny, tmp_path, method_name, cadence, evaluate
    ):
        program = tiny.shared_program(method_name)
        expected, _ = tiny.trained(program, 12)
        options = {"folder": tmp_path, "cadence": cadence, "evaluate": evaluate}
        run = Run(tiny, program, 12, **options)
        tiny.assert_same(tiny.numbers(run.result.state), tiny.numbers(expected))

    def test_a_scan_ends_at_records_evaluations_checkpoints_and_events(self):
        assert scans(None, 25, Cadence(log_every=10)) == [10, 10, 5]
        cadence = Cadence(log_every=1, eval_every=4, checkpoint_every=6)
        assert scans(5, 13, cadence) == [4, 1, 1, 2, 2, 2, 1]

    def test_stretches_are_one_scan_but_where_steps_are_counted(self, monkeypatch):
        """There no scan has more than one program takes."""
        rarely = Cadence(log_every=1000)
        assert scans(None, 30, rarely) == [10, 10, 10]
        assert scans(40, 80, rarely) == [10] * 8
        assert scans(12, 24, rarely) == [10, 2] * 2
        monkeypatch.setattr(FakeProgram, "length_bucket", None)
        assert scans(40, 80, rarely) == [40, 40]
        assert scans(None, MAX_SCAN_STEPS + 7, rarely) == [MAX_SCAN_STEPS, 7]

    @pytest.mark.parametrize(
        ("counts", "lengths"), [(False, [8, 4, 1]), (True, [10, 3])]
    )
    def test_scans_have_few_lengths_if_events_may_come_at_any_step(
        self, counts, lengths
    ):
        measured = types.SimpleNamespace(is_measured=True, warm_up_steps=27)
        program = FakeProgram(13)
        program.length_bucket = 10 if counts else None
        program.method = types.SimpleNamespace(schedule=measured, can_restore=False)
        train_fake(program, 26, Cadence())
        assert program.lengths == lengths * 2

    def test_a_list_of_batches_is_read_once_and_its_end_is_named(self, tiny):
        program = tiny.shared_program("diloco")
        batches = [tiny.make_batch(step) for step in range(6)]
        run = Run(tiny, program, 6, batches=batches)
        expected, _ = tiny.finish(program, tiny.start(program), 6)
        tiny.assert_same(tiny.numbers(run.result.state), tiny.numbers(expected))
        with pytest.raises(ValueError, match="batches ended at step 3"):
            Run(tiny, program, 6, batches=iter(batches[:3]))

    @pytest.mark.parametrize(
        ("name", "least"),
        [("log_every", 1), ("eval_every", 0), ("checkpoint_every", 0)],
    )
    def test_cadences_that_make_no_sense_are_refused(self, name, least):
        why = f"{name}={least - 1} must be at least {least}"
        with pytest.raises(ValueError, match=why):
            Cadence(**{name: least - 1})


class FakeProgram:
    """Takes its time over steps of a length it has not seen, as a compiler does."""

    length_bucket = 10
    model_state = exchange = None
    bytes_per_step = 0
    method = types.SimpleNamespace(schedule=None, sync=None, can_restore=False)

    def __init__(self, event_every=None, aux=None, clock=None):
        self.event_every = event_every
        self.clock = clock
        self.aux = aux or {}
        self.lengths = []

    def steps_to_event(self, state):
        return self.event_every and self.event_every - state.step % self.event_every

    def advance(self, state, batches, times, on_steps):
        del times, on_steps
        length = len(batches)
        if self.clock:
            self.clock.ran(state.step, length, is_new=length not in self.lengths)
        self.lengths.append(length)
        state = dataclasses.replace(state, step=state.step + length)
        aux = {name: jnp.full((length, 1), x) for name, x in self.aux.items()}
        return state, Output(jnp.ones((length, 1)), aux, (), (0,) * length)

    def finite_regions(self, state):
        return np.array([True])

    def mean_params(self, state):
        return None

    outer_params = mean_params

    def region_drift(self, state):
        return 0.0


def train_fake(program, num_steps, cadence, hooks=NO_HOOKS):
    state = TrainState(None)
    batches = itertools.repeat(np.zeros(1))
    options = {"evaluate": lambda params: 0.0} if cadence.eval_every else {}
    options |= {"cadence": cadence, "hooks": hooks}
    return train(program, state, batches, num_steps, lambda step: step, **options)


def scans(event_every, num_steps, cadence):
    program = FakeProgram(event_every)
    train_fake(program, num_steps, cadence)
    return program.lengths


@pytest.mark.parametrize("aux", [{}, {"stage_bytes": 7.0, "accuracy": 0.5}])
def test_a_record_has_the_bytes_that_a_pipelined_loss_reports(aux):
    records = []
    hooks = Hooks(record=records.append)
    train_fake(FakeProgram(aux=aux), 4, Cadence(log_every=2), hooks)
    stage_bytes = [r.get("stage_bytes") for r in records if r["kind"] == "train"]
    assert stage_bytes == [aux.get("stage_bytes")] * 2
    assert not any("accuracy" in record for record in records)


class FakeClock(FlightRecorder):
    """Seconds that pass in the fake program only: `step_s` a step, and compilation.

    In place of the recorder, whose threads would read this clock at any moment.
    """

    def __init__(self, monkeypatch, *, step_s, compile_s=0.0):
        super().__init__()
        self.now_s = 0.0
        self.step_seconds = step_s
        self.compile_s = compile_s
        self.ended = {}
        fake_time = types.SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(loop, "time", fake_time)
        monkeypatch.setattr(loop, "FlightRecorder", lambda earlier_s: self)

    def ran(self, first_step, length, *, is_new):
        self.now_s += length * self.step_seconds + is_new * self.compile_s
        self.ended[first_step + length] = self.now_s

    def done_s(self, step):
        return self.ended[step]


def test_tokens_per_second_leave_compilation_out(monkeypatch):
    """Lengths 10, 10, 5, 5, ...: each turn is read after the next was handed out."""
    clock = FakeClock(monkeypatch, step_s=0.01, compile_s=3.0)
    program = FakeProgram(clock=clock)
    clocks = []
    cadence = Cadence(log_every=10, eval_every=25)
    hooks = Hooks(clock=clocks.append)
    result = train_fake(program, 50, cadence, hooks)

    assert program.lengths == [10, 10, 5, 5, 10, 10]
    steady = [clock.steady_tokens_per_second for clock in clocks]
    assert steady[0] is None
    np.testing.assert_allclose([rate for rate in steady if rate is not None], 100)
    np.testing.assert_allclose(clocks[-1].step_s, 0.01)
    assert result.seconds == pytest.approx(0.5 + 2 * 3)
    assert result.tokens_per_second == pytest.approx(100)


def test_a_turn_is_timed_by_its_own_steps(monkeypatch):
    """Handing out takes as long as the steps, as on CPUs that take turns.

    So each turn but those before an evaluation is read when the next one is done.
    """
    clocks = []
    program = FakeProgram(clock=FakeClock(monkeypatch, step_s=0.01))
    cadence = Cadence(log_every=5, eval_every=10)
    train_fake(program, 40, cadence, Hooks(clock=clocks.append))
    assert [clock.step for clock in clocks] == [5, 10, 15, 20, 25, 30, 35, 40]
    rates = [clock.tokens_per_second for clock in clocks]
    np.testing.assert_allclose(rates, 100)


class TestResuming:
    @pytest.mark.parametrize("stop_after", [1, 3])
    def test_a_stopped_run_goes_on_bit_for_bit(
        self, tiny, tmp_path, evaluate, method_name, stop_after
    ):
        """Stopped between two checkpoints, in the middle of a record's window."""
        program = tiny.shared_program(method_name)
        cadence = {"log_every": 5, "eval_every": 4, "checkpoint_every": 100}
        whole = Run(tiny, program, 12, cadence=cadence, evaluate=evaluate)

        turns = itertools.count()
        options = {"folder": tmp_path, "cadence": cadence, "evaluate": evaluate}
        stop = lambda: next(turns) == stop_after  # noqa: E731
        first = Run(tiny, program, 12, stop=stop, **options)
        stopped = first.result.state.step

        assert 0 < stopped < 12
        assert stopped % 5
        assert first.stopping == [None]  # Before the first save.

        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.latest_step == stopped

        second = Run(tiny, program, 12, **options)
        assert first.records[: second.offset] + second.records == whole.records

        state = program.synchronize(whole.result.state)
        tiny.assert_same(tiny.numbers(second.result.state), tiny.numbers(state))
        assert second.result.last_eval == whole.result.last_eval
        assert second.result.correction_ratio == whole.result.correction_ratio

    def test_records_after_the_checkpoint_are_written_again(self, tiny, tmp_path):
        """As after a kill: the caller cuts its file at the checkpoint's position."""
        program = tiny.shared_program("cocodc")
        cadence = {"log_every": 2, "checkpoint_every": 8}
        whole = Run(tiny, program, 14, cadence=cadence)
        killed = object.__new__(Run)
        options = {"folder": tmp_path, "cadence": cadence}

        def kill():
            if killed.records and killed.records[-1]["step"] > 8:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            killed.__init__(tiny, program, 14, stop=kill, **options)
        second = Run(tiny, program, 14, **options)
        assert second.offset < len(killed.records)
        assert killed.records[: second.offset] + second.records == whole.records

    def test_a_finished_run_does_nothing_more(self, tiny, tmp_path, evaluate):
        program = tiny.shared_program("diloco")
        first = Run(tiny, program, 4, folder=tmp_path, evaluate=evaluate)
        second = Run(tiny, program, 4, folder=tmp_path, evaluate=evaluate)
        assert second.records == []
        assert second.result.last_eval == first.result.last_eval

    def test_a_run_that_begins_at_its_last_step_is_evaluated(
        self, tiny, tmp_path, evaluate
    ):
        program = tiny.shared_program("diloco")
        Run(tiny, program, 9, folder=tmp_path, stop=iter([False, True]).__next__)
        (latest,) = steps_in(tmp_path)
        run = Run(tiny, program, latest, folder=tmp_path, evaluate=evaluate)
        assert run.result.last_eval["step"] == latest < 9
        assert [record["kind"] for record in run.records] == ["eval"]


def loss_plus_bad(params, batch, key):
    loss = jnp.mean((batch["x"] @ params["embed"]) ** 2)
    return loss + batch["bad"], {}


def loss_with_bad_gradient(params, batch, key):
    """Finite, with a gradient that is not where `bad` is: that of the root of 0."""
    loss = jnp.mean((batch["x"] @ params["embed"]) ** 2)
    return loss + jnp.sqrt(jnp.where(batch["bad"] != 0, 0.0, 1.0) * loss), {}


@pytest.fixture(scope="module")
def programs(tiny):
    mesh = make_mesh(4, devices=jax.devices()[:1])
    return {
        loss: tiny.make_program("diloco", mesh, loss=loss)
        for loss in (loss_plus_bad, loss_with_bad_gradient)
    }


class TestNotFinite:
    """A loss or a parameter that is not finite ends the run, and is never saved."""

    def batches(self, tiny, value, bad_step, bad_region):
        for step in itertools.count():
            bad = np.zeros(4, np.float32)
            bad[bad_region] = value if step + 1 == bad_step else 0
            yield {"x": tiny.make_batch(step)["x"], "bad": bad}

    def fails(self, tiny, program, why, bad, **options):
        with pytest.raises(NonFiniteLossError, match=why) as raised:
            Run(tiny, program, 12, batches=self.batches(tiny, *bad), **options)
        return raised.value

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_loss_that_is_not_finite_ends_the_run(
        self, tiny, tmp_path, programs, value
    ):
        why = f"loss is {value} at step 7 in region 2; last good .*: step 4. Low"
        options = {"folder": tmp_path, "cadence": {"checkpoint_every": 4}}
        self.fails(tiny, programs[loss_plus_bad], why, (value, 7, 2), **options)
        assert steps_in(tmp_path) == [4]

    def test_an_elastic_region_is_restored_though_its_program_has_no_other(self):
        one = types.SimpleNamespace(
            finite_regions=lambda state: np.array([False]),
            method=types.SimpleNamespace(can_restore=True),
            regions=types.SimpleNamespace(num=4),
            restore_regions=lambda state, bad: bad,
        )
        assert FiniteWatch(one, None).restored(None) == [True]

    def test_a_bad_loss_before_any_checkpoint_names_its_step_and_region(
        self, tiny, tmp_path, programs
    ):
        program = programs[loss_plus_bad]
        why = "step 3 in .* 1.*there is none"
        error = self.fails(tiny, program, why, (np.nan, 3, 1), folder=tmp_path)
        assert (error.step, error.region) == (3, 1)
        assert not list(tmp_path.iterdir())

    def test_a_parameter_that_is_not_finite_is_not_saved(
        self, tiny, tmp_path, programs
    ):
        """The loss of the last step before a checkpoint was still finite."""
        program = programs[loss_with_bad_gradient]
        why = "a parameter is not finite at step 3 in region 1; .*: step 2"
        options = {"folder": tmp_path, "cadence": {"checkpoint_every": 1}}
        self.fails(tiny, program, why, (1, 3, 1), **options)
        assert steps_in(tmp_path) == [1, 2]

    def test_a_bad_parameter_of_the_last_step_ends_the_run(self, tiny, programs):
        why = "not finite at step 12 in the mean of all regions"
        self.fails(tiny, programs[loss_with_bad_gradient], why, (1, 12, 1))

    def test_records_before_a_bad_loss_are_written(self, tiny, programs):
        run = object.__new__(Run)
        batches = self.batches(tiny, np.nan, 7, 0)
        with pytest.raises(NonFiniteLossError):
            run.__init__(tiny, programs[loss_plus_bad], 12, batches=batches)
        assert [r["step"] for r in run.of_kind("train")] == [3, 6]
