"""Regions that are jobs of their own: the numbers of one process with all of them."""

import re
import socket
import threading

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.runtime.devices.mesh import make_mesh
from cocodc_jax.runtime.exchange.jobs import _table
from cocodc_jax.runtime.exchange.transport import Transport
from cocodc_jax.runtime.membership.link import Link
from cocodc_jax.runtime.membership.place import Place
from cocodc_jax.runtime.membership.protocol import Timing
from cocodc_jax.runtime.program import RegionProgram
from cocodc_jax.runtime.running import run
from cocodc_jax.sync.regions import Regions

# Four threads compile the same programs into one cache, which is made for processes.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation")

KEY = bytes(range(32))
# A machine that is busy is not to be taken for a dead one.
TIMING = Timing(beat_s=0.1, dead_after_s=60, grace_s=300, start_s=60)


def places(num, **options):
    """Places of as many regions at free ports of this machine."""
    probes = [socket.socket() for _ in range(num)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    addresses = tuple(f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)
    for probe in probes:
        probe.close()
    options = {"key": KEY, "timing": TIMING} | options
    return [Place(region, addresses, **options) for region in range(num)]


def own_batches(tiny, region, step=0):
    for batch in tiny.stream(step):
        yield jax.tree.map(lambda x: x[region : region + 1], batch)


def make_program(tiny, method, transport, num):
    return RegionProgram(
        tiny.loss_fn, optax.sgd(0.05, 0.9), method, tiny.make_params(), num,
        mesh=make_mesh(1 if transport.exchange == "jobs" else num),
        transport=transport,
    )  # fmt: skip


def as_jobs(tiny, method, num, num_steps):
    """Every region in a thread of its own; what each has at the end."""
    results, errors = {}, []

    def job(place):
        try:
            program = make_program(tiny, method, Transport("jobs", place=place), num)
            state = tiny.start(program)
            with Link(place, "test", program.route.max_row_bytes) as link:
                program.route.link = link
                assert link.join(60) is None
                batches = own_batches(tiny, place.region)
                for new, _ in run(program, state, batches, num_steps):
                    state = new
                    flying = [s for _, s in state.sync.in_flight]
                    link.at(min(flying, default=state.step))
                results[place.region] = tiny.numbers(state)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=job, args=[p]) for p in places(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[region] for region in range(num)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streaming_diloco", {"num_fragments": 2, "delay_steps": 3}),
        ("cocodc", {"num_fragments": 2, "delay_steps": 3, "compress": "int8"}),
        ("diloco", {"compress": "ef+topk:0.1"}),
    ],
)
def test_the_numbers_are_those_of_one_process(tiny, name, options):
    method, num = methods.get(name, sync_interval=4, **options), 4
    program = make_program(tiny, method, Transport("outer"), num)
    state, _ = tiny.finish(program, tiny.start(program), 11)
    (region, together), memory, step, sent = tiny.numbers(state)
    for m, job in enumerate(as_jobs(tiny, method, num, 11)):
        (own, sync), *rest = job
        assert rest == [memory, step, sent]
        tiny.assert_same(own, jax.tree.map(lambda x, m=m: x[m : m + 1], region))
        tiny.assert_same(sync["outer"], together["outer"])
        for k in together["in_flight"]:
            mean = sync["in_flight"][k].mean
            tiny.assert_same(mean, together["in_flight"][k].mean)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("data_parallel", "its regions exchange at every step"),
        ("apart", "it exchanges nothing"),
        ("noloco", "its outer parameters lie in the regions"),
        ("des_loc", "it averages the inner optimizer's state too"),
        ("co2", "its outer state is divided over the inner mesh"),
        ("delayed_nesterov", "."),
    ],
)
def test_what_cannot_be_jobs_is_refused_by_name(tiny, name, why):
    transport = Transport("jobs", place=places(4)[0])
    pattern = f"exchange='jobs' is not possible for method='{name}': .*{why}"
    with pytest.raises(ValueError, match=pattern):
        make_program(tiny, methods.get(name), transport, 4)


def test_what_follows_all_regions_is_refused():
    transport = Transport("jobs", place=places(4)[0])
    options = {"sync_interval": 4, "num_fragments": 2}
    for more, why in (
        ({"delay_steps": "auto"}, "follow all regions"),
        ({"delay_steps": 2, "transmission_score": "drift"}, "all regions' parameters"),
    ):
        method = methods.get("cocodc", **options, **more)
        with pytest.raises(ValueError, match=why):
            transport.own(Regions.alike(4), method)


def test_places_that_cannot_be_are_refused():
    method = methods.get("diloco")
    with pytest.raises(ValueError, match="which region this is"):
        Transport("jobs").own(Regions.alike(2), method)
    with pytest.raises(ValueError, match="regions=3 but region_addresses has 2"):
        Transport("jobs", place=places(2)[0]).own(Regions.alike(3), method)
    with pytest.raises(ValueError, match="outer_channels=2 has no meaning"):
        Transport("jobs", outer_channels=2)
    for change, message in (
        ({"addresses": ("a:1", "b")}, "region_addresses has 'b'"),
        ({"addresses": ("a:1", "a:1")}, "one address twice"),
        ({"region": 2}, "region_id=2 must be 0 to 1"),
        ({"min_regions": 3}, "min_regions=3 must be 1 to 2"),
        ({"key": b"short"}, "the key has 5 bytes"),
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
