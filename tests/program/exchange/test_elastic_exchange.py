"""Elastic regions: the numbers of one process with all of them."""

import itertools
import re
import threading
import time
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.elastic.failure_detector import Timing
from cocodc_jax.elastic.link import Link
from cocodc_jax.elastic.messages import Decision
from cocodc_jax.elastic.place import Place
from cocodc_jax.exchange.elastic_exchange import _table
from cocodc_jax.exchange.transport import Transport
from cocodc_jax.netlab.independent import free_addresses
from cocodc_jax.sharding.mesh import make_mesh
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.robust import RESTORED
from cocodc_jax.train.run_steps import run
from tests.numerics import assert_within_ulps
from tests.program import tiny

# Four threads compile the same programs into one cache, which is made for processes.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation")

KEY = bytes(range(32))
SHORT = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 2}
# A machine that is busy is not to be taken for a dead one.
TIMING = Timing(beat_s=0.1, dead_after_s=60, grace_s=300, start_s=60)


def places(num, **options):
    """Places of as many regions at free ports of this machine."""
    addresses = free_addresses(num)
    options = {"addresses": addresses, "key": KEY, "timing": TIMING} | options
    return [Place(region, **options) for region in range(num)]


def own_batches(region, step=0):
    for batch in tiny.stream(step):
        yield jax.tree.map(lambda x: x[region : region + 1], batch)


def make_program(method, transport, num):
    mesh = make_mesh(1 if transport.exchange == "elastic" else num)
    return tiny.program_of(method, mesh, regions=num, transport=transport)


def as_processes(method, num, num_steps, **options):
    """Every region in a thread of its own; what each has at the end."""
    results, errors = {}, []

    def job(place):
        try:
            program = make_program(method, Transport("elastic", place=place), num)
            state = tiny.start(program)
            with Link(place, "test", program.exchange.max_row_bytes) as link:
                program.exchange.link = link
                assert link.join(60) is None
                batches = own_batches(place.region)
                for new, _ in run(program, state, batches, num_steps):
                    state = new
                    flying = [s for _, s in state.sync.in_flight]
                    link.at(min(flying, default=state.step))
                results[place.region] = tiny.numbers(state)
                link.finish(60)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=job, args=[p]) for p in places(num, **options)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[region] for region in range(num)]


@pytest.mark.parametrize(
    ("name", "options", "has_ports"),
    [
        ("streaming_diloco", {"num_fragments": 2, "delay_steps": 2}, True),
        ("cocodc", {"num_fragments": 2, "delay_steps": 3, "compress": "int8"}, False),
        ("diloco", {"compress": "ef+topk:0.1"}, True),
    ],
)
def test_the_numbers_are_those_of_one_process(tmp_path, name, options, has_ports):
    # Two regions: each compiles programs of its own.
    method, num = methods.get(name, sync_interval=4, **options), 2
    program = make_program(method, Transport("outer"), num)
    state = tiny.start(program)
    batches = (jax.tree.map(lambda x: x[:num], batch) for batch in tiny.stream())
    for new, _ in run(program, state, batches, 10):
        state = new
    (region, together), memory, step, sent = tiny.numbers(state)
    via = {} if has_ports else {"addresses": (), "via": str(tmp_path), "regions": num}
    for m, job in enumerate(as_processes(method, num, 10, **via)):
        (own, sync), *rest = job
        assert_within_ulps(rest, [memory, step, sent])
        assert_within_ulps(own, jax.tree.map(lambda x, m=m: x[m : m + 1], region))
        assert_within_ulps(sync["outer"], together["outer"])
        for k in together["in_flight"]:
            mean = sync["in_flight"][k].mean
            assert_within_ulps(mean, together["in_flight"][k].mean)


def with_nonsense(stream):
    """The same, but that region 1 is given other numbers at step 1."""

    def changed(first_step=0):
        for step, batch in enumerate(stream(first_step), first_step):
            y = batch["y"].copy()
            y[1] *= 100 if step == 1 else 1
            yield {**batch, "y": y}

    return changed


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"exclude_above": 3.0}, marks=pytest.mark.slow),
        {"compress": "int8", "robust_mean": "trim:0.25"},
    ],
)
def test_nonsense_is_judged_alike_in_all_regions(monkeypatch, options):
    """And the region that sent it begins anew, as in one process with all of them."""
    method, num = methods.get("streaming_diloco", **SHORT, **options), 4
    monkeypatch.setattr(tiny, "stream", with_nonsense(tiny.stream))
    program = make_program(method, Transport("outer"), num)
    state, verdicts = tiny.start(program), []
    for new, output in run(program, state, tiny.stream(), 9):
        state = new
        verdicts += [np.asarray(s.verdict % RESTORED).tolist() for s in output.syncs]
    if "exclude_above" in options:
        assert [0, 2, 0, 0] in verdicts
    (region, together), *_ = tiny.numbers(state)
    for m, job in enumerate(as_processes(method, num, 9)):
        (own, sync), *_ = job
        assert_within_ulps(own, jax.tree.map(lambda x, m=m: x[m : m + 1], region))
        assert_within_ulps(sync["outer"], together["outer"])


class Told:
    """In place of a link: means are of what the test says, when it says so."""

    def __init__(self):
        self.futures, self.rows = {}, {}

    def send(self, sync, row, step_s):
        del step_s
        self.rows[sync] = row
        return self.futures.setdefault(sync, Future())

    def decide(self, sync, *regions):
        """Of zeros from these regions; of this region's own message, if it is 0."""
        while sync not in self.rows:
            time.sleep(0.01)
        zeros = bytes(len(self.rows[sync]))
        rows = {r: zeros if r else self.rows[sync] for r in regions}
        self.futures[sync].set_result(Decision(3, sync, rows))


def of_one_job(method, **options):
    place = places(2, **options)[0]
    program = make_program(method, Transport("elastic", place=place), 2)
    program.exchange.link = Told()
    own = itertools.islice(own_batches(0), 8)
    batches = [jax.tree.map(lambda x: x[None], batch) for batch in own]
    return program, tiny.start(program), batches


@pytest.mark.parametrize("late_message", ["keep", "drop"])
def test_the_work_of_a_message_that_came_too_late(late_message):
    """By hand: the mean is zero, so the outer parameters stay theta_0."""
    method = methods.get("diloco", sync_interval=2)
    program, state, batches = of_one_job(method, late_message=late_message)
    first = tiny.host(state.region.params)
    own, _ = program._steps(
        state.region, program._batches.put(stacked(batches[:2])), None, None, ()
    )
    trained = tiny.host(own.params)
    state = tiny.start(program)
    threading.Timer(0.1, program.exchange.link.decide, [(0, 2), 1]).start()
    state, _ = program.advance(state, stacked(batches[:2]))
    wanted = trained if late_message == "keep" else first
    assert_within_ulps(state.region.params, wanted)
    outer = jax.tree.map(lambda x: x[0], first)
    assert_within_ulps(program.outer_params(state), outer)


def stacked(batches):
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streaming_diloco", {}),
        ("cocodc", {"compress": "int8", "syncs_per_interval": 2}),
    ],
)
def test_a_mean_that_is_late_is_merged_for_its_true_age(name, options):
    """Due after 1 step and there after 2: as where 2 is the delay."""
    ends = []
    for delay_steps in (1, 2):
        method = methods.get(
            name, sync_interval=4, num_fragments=2, delay_steps=delay_steps,
            **options,
        )  # fmt: skip
        program, state, batches = of_one_job(method, late_mean="merge")
        for step in range(4):
            if step == 3:
                (flying,) = state.sync.schedule.in_flight
                assert flying[1:3] == (2, 4)
                program.exchange.link.decide(flying.sync_id, 0, 1)
            state, output = program.advance(state, stacked(batches[step : step + 1]))
            assert [s.apply_step for s in output.syncs] == [4] * (step == 3)
        ends.append(tiny.host((state.region.params, state.sync.outer)))
    assert_within_ulps(*ends)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("data_parallel", "its regions exchange at every step"),
        ("apart", "it exchanges nothing"),
        ("noloco", "each region has outer parameters of its own"),
        ("des_loc", "it averages the inner optimizer's state too"),
        ("co2", "its outer state is divided over the inner mesh"),
        ("delayed_nesterov", "."),
        ("masked_core", "each region sends a part of its own, by its number"),
    ],
)
def test_what_cannot_be_jobs_is_refused_by_name(name, why):
    transport = Transport("elastic", place=places(4)[0])
    method = methods.get(name)
    pattern = (
        f"exchange='elastic' is not possible for method='{name}': .*{why}.*; use '"
    )
    with pytest.raises(ValueError, match=pattern) as refused:
        make_program(method, transport, 4)
    # What it proposes can be had, by one process and by several.
    proposed = Transport(str(refused.value).split("'")[-2])
    assert {proposed.resolve(method, num) for num in (1, 4)} <= {"program", "outer"}


@pytest.mark.parametrize(
    ("name", "options", "late_mean", "why"),
    [
        ("cocodc", SHORT | {"delay_steps": "auto"}, "wait", "follow all regions"),
        (
            "cocodc",
            SHORT | {"transmission_score": "drift"},
            "wait",
            "all regions' parameters",
        ),
        (
            "decoupled_diloco",
            {"answer_steps": "1,1,1,9"},
            "wait",
            "a part of its regions takes part",
        ),
        # A delay that is looked halfway at is known before.
        (
            "cocodc",
            SHORT | {"curvature": "secant"},
            "merge",
            "late_mean='merge' is not possible for meth",
        ),
        ("cocodc", SHORT | {"curvature": "secant"}, "wait", None),
    ],
)
def test_what_regions_must_know_of_one_another_is_refused(
    name, options, late_mean, why
):
    place, method = places(4, late_mean=late_mean)[0], methods.get(name, **options)
    transport = Transport("elastic", place=place)
    if why is None:
        transport.own(Regions.alike(4), method)
        return
    with pytest.raises(ValueError, match=why):
        transport.own(Regions.alike(4), method)


def test_places_that_cannot_be_are_refused():
    method = methods.get("diloco")
    with pytest.raises(ValueError, match="which region this is"):
        Transport("elastic").own(Regions.alike(2), method)
    with pytest.raises(ValueError, match="regions=3 but region_addresses has 2"):
        Transport("elastic", place=places(2)[0]).own(Regions.alike(3), method)
    with pytest.raises(ValueError, match="outer_channels=2 has no meaning"):
        Transport("elastic", outer_channels=2)
    for change, message in (
        ({"addresses": ("a:1", "b")}, "region_addresses has 'b'"),
        ({"addresses": ("a:1", "a:1")}, "one address twice"),
        ({"region": 2}, "region_id=2 must be 0 to 1"),
        ({"min_regions": 3}, "min_regions=3 must be 1 to 2"),
        ({"key": b"short"}, "the key has 5 bytes"),
        ({"late_mean": "drop"}, "late_mean='drop' is unknown"),
        ({"late_message": "wait"}, "late_message='wait' is unknown"),
        ({"timing": Timing(quorum=3)}, "quorum_regions=3 must be 1 to 2"),
    ):
        fields = {"region": 0, "addresses": ("a:1", "b:2"), "key": KEY} | change
        with pytest.raises(ValueError, match=re.escape(message)):
            Place(**fields)
    assert "key" not in repr(places(1)[0])


def test_rows_of_another_size_are_named():
    rows = {0: np.float32([1, 2]).tobytes(), 2: b"\0" * 4}
    with pytest.raises(ValueError, match="message of region 2 has 4 bytes, not 8"):
        _table(rows, 4, 2, np.float32)
    table, weights = _table({2: rows[0]}, 3, 2, np.float32)
    assert weights == (0, 0, 1)
    np.testing.assert_array_equal(table, [[1, 2]] * 3)
    assert _table({}, 2, 2, np.float32)[1] == (0, 0)
