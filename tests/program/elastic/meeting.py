"""Regions that meet at ports of this machine, or in a store."""

from cocodc_jax.elastic.place import Place, Timing
from cocodc_jax.netlab.children import free_addresses
from tests.waiting import wait_until

KEY = b"k" * 32
# A machine that is busy is not to be taken for a dead one.
TIMING = Timing(beat_s=0.05, dead_after_s=60, grace_s=300, start_s=60)


def places(num, via=None, **options):
    """Places of as many regions."""
    if via is None:
        where = {"addresses": free_addresses(num)}
    else:
        where = {"addresses": (), "via": str(via), "regions": num}
    options = where | {"key": KEY, "timing": TIMING} | options
    return [Place(region, **options) for region in range(num)]


def join(*links):
    assert [link.join(30) for link in links] == [None] * len(links)


def let_in(first, copy):
    """Send a copy to region 1, once it asks to take part."""
    wait_until(lambda: first.at(copy.step))
    first.let_in(1, first.at(copy.step)[1], copy, copy.step)


def mean(links, step, rows=(b"a", b"b")):
    """Send a message of each region; all take the mean of all."""
    futures = [x.send((0, step), row) for x, row in zip(links, rows, strict=True)]
    for future in futures:
        assert dict(future.result(30).rows) == dict(enumerate(rows))
