r"""Times a sync of elastic regions: over sockets of this machine, and through a store.

    python -m experiments.message_time --via=FOLDER --kib=1,1024 --syncs=20

For each size of a message it prints the median seconds (and the range) from the moment
at which all regions send to the moment at which all have the decision. Both channels
are timed in turn. Nothing is trained: all regions are threads of one process.
"""

import contextlib
import functools
import pathlib
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence

from cocodc_jax.elastic.link import Link
from cocodc_jax.elastic.objects import reach
from cocodc_jax.elastic.place import BUCKET_BEAT_S, Place, Timing, is_bucket
from cocodc_jax.netlab.children import free_addresses

from . import program


def sync_seconds(links: Sequence[Link], row: bytes, step: int) -> float:
    """Return the seconds from all messages to all decisions of a sync."""
    began = time.perf_counter()
    futures = [link.send((0, step), row) for link in links]
    for future in futures:
        assert len(future.result(600).rows) == len(links)
    seconds = time.perf_counter() - began
    for link in links:
        link.at(step + 1)
    return seconds


def main(argv: Sequence[str]) -> int:
    """Run the program."""
    values = program.own_flags(
        ("via", pathlib.Path, "folder or bucket"),
        ("kib", ["1", "1024", "16384"], "sizes of a message, KiB"),
        ("regions", 2, "M"),
        ("syncs", 20, "of each size"),
        regions=1,
        syncs=1,
    )
    with program.usage_errors(values):
        program.parse(values, argv, __doc__, has_words=False)
        sizes = [1024 * size for size in program.numbers("kib", values.kib)]
        if min(sizes, default=0) < 1:
            raise ValueError(
                f"kib={','.join(values.kib)} must be numbers of at least 1"
            )

        via = values.via or tempfile.mkdtemp()
        reach(via)
        beat_s = BUCKET_BEAT_S if is_bucket(via) else 0.5
        place = functools.partial(
            Place, key=secrets.token_bytes(32), timing=Timing(beat_s, 60, 600)
        )
        addresses = free_addresses(values.regions)
        regions = range(values.regions)
        places = {
            "sockets": [place(region, addresses) for region in regions],
            f"via {pathlib.Path(via).name}": [
                place(region, (), via=via, regions=values.regions) for region in regions
            ],
        }

    with contextlib.ExitStack() as stack:
        links = {
            name: [
                stack.enter_context(Link(place, "timed", max(sizes)))
                for place in of_channel
            ]
            for name, of_channel in places.items()
        }
        for of_channel in links.values():
            for link in of_channel:
                link.join(600)

        step = 0
        for size in sizes:
            row = secrets.token_bytes(size)
            times_s = {name: [] for name in links}
            for _ in range(values.syncs):
                step += 1
                for name, of_channel in links.items():
                    times_s[name].append(sync_seconds(of_channel, row, step))

            for name, seconds in times_s.items():
                print(
                    f"{size // 1024:>8} KiB {name:20} {statistics.median(seconds):.3f}"
                    f" s ({min(seconds):.3f} to {max(seconds):.3f})"
                )

    return 0


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
