"""Elastic regions: the numbers of one process with all of them."""

import itertools
import re
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import jax
import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.elastic.link import Link
from cocodc_jax.elastic.messages import NO_EPOCH, Decision
from cocodc_jax.elastic.place import Place, Timing
from cocodc_jax.engine.elastic_exchange import ElasticExchange, _sound, _table
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.robust import RESTORED
from cocodc_jax.train.run_steps import run_steps as run
from tests.numerics import assert_within_ulps
from tests.program import mixture
from tests.program.elastic.meeting import KEY, places
from tests.program.tiny import follow

# Four threads compile the same programs into one cache, which is made for processes.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation")

SHORT = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 2}


def own_batches(tiny, region, step=0):
    for batch in tiny.stream(step):
        yield jax.tree.map(lambda x: x[region : region + 1], batch)


def make_program(tiny, method, transport, num):
    return RegionProgram(
        tiny.loss_fn,
        tiny.OPTIMIZER,
        method,
        tiny.make_params(),
        num,
        mesh=make_mesh(1 if transport.exchange == "elastic" else num),
        transport=transport,
        user_inputs=tiny.USER_INPUTS,
    )


def as_processes(tiny, method, num, num_steps, **options):
    """Train every region in a thread of its own; return their ends."""

    def job(place):
        program = make_program(tiny, method, Transport("elastic", place=place), num)
        state = tiny.start(program)

        with Link(place, "test", program.exchange.max_row_bytes) as link:
            program.exchange.link = link
            assert link.join(60) is None

            batches = own_batches(tiny, place.region)
            for new, _ in run(program, state, batches, num_steps):
                state = new
                flying = [s for _, s in state.sync.in_flight]
                link.at(min(flying, default=state.step))

            end = tiny.numbers(state)
            link.finish(60)
            return end

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(job, places(num, **options)))


def assert_each_alone_as_together(tiny, method, num, num_steps, via=None):
    """Compare regions with one process of all regions; return the outputs of that."""
    program = make_program(tiny, method, Transport("outer"), num)
    batches = (jax.tree.map(lambda x: x[:num], batch) for batch in tiny.stream())
    state, outputs = follow(program, tiny.start(program), batches, num_steps)
    (region, together), *expected = tiny.numbers(state)

    for m, job in enumerate(as_processes(tiny, method, num, num_steps, via=via)):
        (local, sync), *rest = job
        assert_within_ulps(rest, expected)
        assert_within_ulps(local, jax.tree.map(lambda x, m=m: x[m : m + 1], region))
        assert_within_ulps(sync["outer"], together["outer"])
        for k, flight in together["in_flight"].items():
            assert_within_ulps(sync["in_flight"][k].mean, flight.mean)

    return outputs


OF_EXPERTS = {"delay_steps": 2, "compress": "ef+int8", **mixture.OPTIONS}


@pytest.mark.parametrize(
    ("name", "options", "has_ports"),
    [
        ("streaming_diloco", {"num_fragments": 2, "delay_steps": 2}, True),
        ("cocodc", {"num_fragments": 2, "delay_steps": 3, "compress": "int8"}, False),
        ("diloco", {"compress": "ef+topk:0.1"}, True),
        pytest.param("streaming_diloco", OF_EXPERTS, True, marks=pytest.mark.slow),
    ],
)
def test_elastic_regions_train_what_one_process_does(
    tiny, tmp_path, name, options, has_ports
):
    tiny = mixture.in_place_of(tiny) if "expert_weights" in options else tiny
    # Only two regions, as each compiles programs of its own.
    method = methods.get(name, sync_interval=4, **options)
    assert_each_alone_as_together(
        tiny, method, 2, 10, via=None if has_ports else tmp_path
    )


def with_nonsense(tiny):
    """The same, but that region 1 is given other numbers at step 1."""

    def stream(first_step=0):
        for step, batch in enumerate(tiny.stream(first_step), first_step):
            y = batch["y"].copy()
            y[1] *= 100 if step == 1 else 1
            yield {**batch, "y": y}

    return types.SimpleNamespace(**{**vars(tiny), "stream": stream})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "streaming_diloco", SHORT | {"exclude_above": 3.0}, marks=pytest.mark.slow
        ),
        # A message leaves before the verdict on the one before it comes.
        pytest.param(
            "dilocox",
            {"sync_interval": 2, "rank": 2, "min_rank": 1, "exclude_above": 3.0},
            marks=pytest.mark.slow,
        ),
        ("streaming_diloco", SHORT | {"compress": "int8", "robust_mean": "trim:0.25"}),
    ],
)
def test_every_region_excludes_the_same_bad_messages(tiny, name, options):
    """The region that sent them restarts, as in one process of all regions."""
    method = methods.get(name, **options)
    outputs = assert_each_alone_as_together(with_nonsense(tiny), method, 4, 9)
    verdicts = [(s.verdict % RESTORED).tolist() for x in outputs for s in x.syncs]
    assert "exclude_above" not in options or [0, 2, 0, 0] in verdicts


class DecidedLink:
    """A stand-in for a link: the test decides the means and when they arrive."""

    def __init__(self):
        self.futures = {}
        self.rows = {}

    def send(self, sync, row, step_s):
        del step_s
        self.rows[sync] = row
        return self.futures.setdefault(sync, Future())

    def wait_for(self, future):
        return future.result()

    def decide(self, sync, *regions):
        """Deliver a mean of zeros of these regions; of its own message for region 0."""
        while sync not in self.rows:
            time.sleep(0.01)
        zeros = bytes(len(self.rows[sync]))
        rows = {r: zeros if r else self.rows[sync] for r in regions}
        self.futures[sync].set_result(Decision(3, sync, rows))


def of_one_job(tiny, method, **options):
    place = places(2, **options)[0]
    program = make_program(tiny, method, Transport("elastic", place=place), 2)
    program.exchange.link = DecidedLink()
    batches = itertools.islice(own_batches(tiny, 0), 8)
    return program, tiny.start(program), jax.tree.map(lambda *x: np.stack(x), *batches)


def trained_late(tiny, method, late_message):
    """Parameters after two steps, without and with a mean of the other region alone."""
    program, state, batches = of_one_job(tiny, method, late_message=late_message)
    batches = jax.tree.map(lambda x: x[:2], batches)
    trained, _ = program._steps(
        tiny.start(program).region, program._batches.put(batches), None, None, ()
    )
    threading.Timer(0.1, program.exchange.link.decide, [(0, 2), 1]).start()
    state, _ = program.advance(state, batches)
    return trained.params, state.region.params, program.outer_params(state)


@pytest.mark.parametrize("late_message", ["keep", "drop"])
def test_late_message_keeps_or_drops_the_progress_of_a_late_message(tiny, late_message):
    """By hand: the mean is zero, so the outer parameters stay theta_0."""
    method = methods.get("diloco", sync_interval=2)
    trained, merged, outer = trained_late(tiny, method, late_message)
    first = tiny.make_params()
    dropped = jax.tree.map(lambda x: x[None], first)
    assert_within_ulps(merged, trained if late_message == "keep" else dropped)
    assert_within_ulps(outer, first)


def test_a_mixture_keeps_the_counts_of_a_message_that_came_too_late(tiny):
    """Experts that this region used keep their progress, others have none."""
    tiny = mixture.in_place_of(tiny)
    method = methods.get("diloco", sync_interval=2, expert_weights="tokens")
    trained, kept, _ = map(experts_of, trained_late(tiny, method, "keep"))
    _, dropped, _ = map(experts_of, trained_late(tiny, method, "drop"))
    first = experts_of(tiny.make_params())
    counts = trained.pop("tokens")[0]

    np.testing.assert_array_equal(kept.pop("tokens")[0], counts)
    assert not dropped.pop("tokens").any()

    for name, before in dropped.items():
        np.testing.assert_array_equal(before[0], first[name])
        is_used = (counts > 0)[..., None, None]
        wanted = np.where(is_used, trained[name][0], first[name])
        assert_within_ulps(kept[name][0], wanted)
    assert (counts == 0).any()


def experts_of(params):
    return jax.tree.map(np.array, params["blocks"]["moe"]["experts"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streaming_diloco", {}),
        ("cocodc", {"compress": "int8", "syncs_per_interval": 2}),
    ],
)
def test_a_late_mean_is_merged_with_its_true_delay(tiny, name, options):
    """Due after 1 step and there after 2: as where 2 is the delay."""

    def merged_at_4(delay_steps):
        method = methods.get(name, **SHORT | {"delay_steps": delay_steps} | options)
        program, state, batches = of_one_job(tiny, method, late_mean="merge")
        for step in range(4):
            if step == 3:
                (flying,) = state.sync.schedule.in_flight
                assert flying[1:3] == (2, 4)
                program.exchange.link.decide(flying.sync_id, 0, 1)

            batch = jax.tree.map(lambda x, step=step: x[step : step + 1], batches)
            state, output = program.advance(state, batch)
            assert [s.apply_step for s in output.syncs] == [4] * (step == 3)

        return tiny.host((state.region.params, state.sync.outer))

    assert_within_ulps(merged_at_4(delay_steps=1), merged_at_4(delay_steps=2))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("data_parallel", "its regions exchange at every step"),
        ("apart", "it exchanges nothing"),
        ("noloco", "each region has outer parameters of its own"),
        ("des_loc", "it averages the inner optimizer's state too"),
        ("co2", "its outer state is divided over the inner mesh"),
        ("delayed_nesterov", "."),
    ],
)
def test_methods_that_cannot_run_as_elastic_regions_are_refused_by_name(name, why):
    transport = Transport("elastic", place=places(4)[0])
    method = methods.get(name)
    pattern = (
        f"exchange='elastic' is not possible for method='{name}': .*{why}.*; use '"
    )

    with pytest.raises(ValueError, match=pattern) as refused:
        transport.own(Regions.alike(4), method)

    # The proposed exchange works, with one process and with several.
    proposed = Transport(str(refused.value).split("'")[-2])
    assert {proposed.resolve(method, num) for num in (1, 4)} <= {"program", "outer"}


def exchange_of(name, options, **place):
    """Return the exchange of one of four regions."""
    transport = Transport("elastic", place=places(4, **place)[0])
    return transport.own(Regions.alike(4), methods.get(name, **options))


@pytest.mark.parametrize(
    ("name", "options", "place", "why"),
    [
        ("cocodc", SHORT | {"delay_steps": "auto"}, {}, "follow all regions"),
        ("cocodc", SHORT | {"transmission_score": "drift"}, {}, "all regions' param"),
        ("decoupled_diloco", {"answer_steps": "1,1,1,9"}, {}, "a part of its regions"),
        (
            "cocodc",
            SHORT | {"curvature": "secant"},
            {"late_mean": "merge"},
            "late_mean='merge' is not possible for meth",
        ),
    ],
)
def test_methods_that_follow_all_regions_or_the_delay_are_refused(
    name, options, place, why
):
    with pytest.raises(ValueError, match=why):
        exchange_of(name, options, **place)


@pytest.mark.parametrize(
    ("options", "late_mean", "least"),
    [
        ({"num_fragments": 4, "delay_steps": 7}, "wait", 4),
        ({"num_fragments": 4, "delay_steps": 3}, "wait", 2),
        ({"num_fragments": 4, "delay_steps": 2}, "wait", 1),
        ({"num_fragments": 4, "delay_steps": 2}, "merge", 4),
    ],
)
def test_fewer_syncs_behind_than_are_in_flight_are_refused(options, late_mean, least):
    """By hand: a start every two steps of eight, each in flight for the delay."""

    def behind(most):
        timing = Timing(max_behind=most)
        return exchange_of(
            "streaming_diloco",
            {"sync_interval": 8} | options,
            late_mean=late_mean,
            timing=timing,
        )

    behind(least)
    if least > 1:
        with pytest.raises(ValueError, match=f"={least - 1} must be at least {least}:"):
            behind(least - 1)


def test_a_merge_that_looks_halfway_is_allowed_with_a_fixed_delay():
    exchange_of("cocodc", SHORT | {"curvature": "secant"})


@pytest.mark.parametrize(
    ("num_places", "message"),
    [(0, "which region this is"), (2, "regions=3 but region_addresses has 2")],
)
def test_a_transport_without_a_place_among_its_regions_is_refused(num_places, message):
    place = places(num_places)[0] if num_places else None
    transport = Transport("elastic", place=place)

    with pytest.raises(ValueError, match=message):
        transport.own(Regions.alike(3), methods.get("diloco"))


def test_channels_of_regions_that_come_and_go_are_refused():
    with pytest.raises(ValueError, match="outer_channels=2 has no meaning"):
        Transport("elastic", outer_channels=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"addresses": ("a:1", "b")}, "region_addresses has 'b'"),
        ({"addresses": ("a:1", "b:70000")}, "region_addresses has 'b:70000'"),
        ({"addresses": ("a:1", "b c:5")}, "region_addresses has 'b c:5'"),
        ({"addresses": ("a:1", "tcp://b:5")}, "region_addresses has 'tcp://b:5'"),
        ({"addresses": ("a:1", "a:1")}, "one address twice"),
        ({"region": 2}, "region_id=2 must be 0 to 1"),
        ({"min_regions": 3}, "min_regions=3 must be 1 to 2"),
        ({"key": b"short"}, "the key has 5 bytes"),
        ({"late_mean": "drop"}, "late_mean='drop' is unknown"),
        ({"late_message": "wait"}, "late_message='wait' is unknown"),
        ({"timing": Timing(quorum=3)}, "quorum_regions=3 must be 1 to 2"),
    ],
)
def test_invalid_places_are_refused(change, message):
    fields = {"region": 0, "addresses": ("a:1", "b:2"), "key": KEY} | change

    with pytest.raises(ValueError, match=re.escape(message)):
        Place(**fields)


def test_the_text_of_a_place_has_no_key():
    assert "key" not in repr(places(1)[0])


def test_a_wait_for_a_mean_ends_if_the_link_ends_it():
    """So a region that is asked to stop waits no longer."""
    exchange = object.__new__(ElasticExchange)
    exchange.link = mock.Mock()
    exchange.arriving = exchange.row_shape = mock.Mock()
    mean = exchange._in_thread((0, 4), 0, mock.Mock(side_effect=OSError("no link")))
    assert mean.result() is exchange.link.wait_for.return_value


def test_a_row_of_another_size_is_in_no_mean():
    exchange = object.__new__(ElasticExchange)
    exchange.link = None
    exchange.in_mean = {}
    exchange.arriving = exchange._landed = mock.Mock()
    exchange.row_shape = mock.Mock(return_value=np.empty((1, 2), np.float32))

    rows = {0: bytes(8), 2: bytes(4)}
    decision = Decision(NO_EPOCH, (0, 4), rows)

    exchange._in_thread((0, 4), 0, lambda: (None, decision)).result()

    assert exchange._landed.call_args.kwargs["rows"] == {0: rows[0]}
    assert exchange.in_mean == {(0, 4): (0,)}


def test_a_sender_of_rows_of_another_size_is_left_out_and_named(capsys):
    rows = {0: np.float32([1, 2]).tobytes(), 2: b"\0" * 4}
    like = np.empty((1, 2), np.float32)
    assert _sound((1, 30), rows, like) == {0: rows[0]}

    word = (
        "message of region 2 for fragment 1 at step 30 has 4 bytes, not 8: it is left"
    )
    assert word in capsys.readouterr().err

    table, weights = _table({2: rows[0]}, 3, like)
    assert weights == (0, 0, 1)
    np.testing.assert_array_equal(table, [[1, 2]] * 3)
    assert _table({}, 2, like)[1] == (0, 0)
