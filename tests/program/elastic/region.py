"""A region without a model, as a process: `python -m tests.program.elastic.region`.

It reads its place from JSON on the command line and trains: its outer model is a chain
of hashes over the rows of each mean, so that two regions that applied the same means
have the same model. Each applied sync is a line of FOLDER/LIFE.jsonl.
"""

import hashlib
import json
import os
import pathlib
import random
import sys
import time

from cocodc_jax.elastic import stores
from cocodc_jax.elastic.link import LeftBehindError, Link, SupersededError
from cocodc_jax.elastic.messages import Mark, Snapshot
from cocodc_jax.elastic.place import Place, Timing

DELAY = 2  # A mean is applied this number of syncs after its messages.


class Toy:
    """A region's model and its means in flight."""

    def __init__(self, link, out):
        self.link = link
        self.out = out
        self.step = 0
        self.outer = "start"
        self.flights = {}

    def write(self, **line):
        self.out.write(json.dumps(line | {"time": time.time()}) + "\n")
        self.out.flush()

    def copy(self):
        header = {"outer": self.outer, "flights": sorted(self.flights)}
        return Snapshot(self.step, header=header, arrays=())

    def begin(self, copy):
        if copy is None:
            return
        self.step = copy.step
        self.outer = copy.header["outer"]
        self.flights = {
            step: self.link.expect((0, step)) for step in copy.header["flights"]
        }

    def turn(self, seconds, spoils_at):
        """Take a step: send, apply due means, and admit others."""
        self.step += 1
        row = f"{self.link.region} {self.step}".encode()
        self.flights[self.step] = self.link.send((0, self.step), row)
        time.sleep(seconds)

        marks = []
        due = self.step - DELAY
        if due in self.flights:
            decision = self.flights.pop(due).result()
            if decision.rows:
                rows = sorted((r, bytes(x).decode()) for r, x in decision.rows.items())
                text = json.dumps([self.outer, due, rows])
                self.outer = hashlib.sha256(text.encode()).hexdigest()[:15]
                if self.step == spoils_at:
                    self.outer = "f" * 15

                value = int(self.outer, 16)
                marks.append(Mark((0, due), value, value / 16**15, 1.0))
                self.write(sync=due, outer=self.outer, regions=[r for r, _ in rows])

        oldest = min(self.flights, default=self.step)
        for region, boot in self.link.at(oldest, marks).items():
            self.link.let_in(region, boot, self.copy(), oldest)


def listed_late(seconds):
    """Let a folder list files late, out of order, and after their removal."""
    list_all = stores.Folder.list
    shown = {}  # When each file is shown first, and when no more.

    def late(folder):
        now = time.monotonic()
        names = set(list_all(folder))

        for name in names - shown.keys():
            shown[name] = [now + random.uniform(0, seconds), None]
        for name in shown.keys() - names:
            if shown[name][1] is None:
                shown[name][1] = now + random.uniform(0, seconds)
        for name in [x for x, (_, end) in shown.items() if end and end < now]:
            del shown[name]

        return [name for name, (begin, _) in shown.items() if begin <= now]

    stores.Folder.list = late


def main():
    """Train until killed or superseded; return the exit code."""
    settings = json.loads(sys.argv[1])
    timing = Timing(**settings["timing"])
    place = Place(
        settings["region"],
        tuple(settings["addresses"]),
        b"k" * 32,
        timing,
        via=settings["via"],
        regions=settings["regions"],
    )
    folder = pathlib.Path(settings["folder"])

    clock = time.time_ns
    time.time_ns = lambda: clock() + int(settings["clock_s"] * 1e9)
    if settings["late_s"]:
        listed_late(settings["late_s"])

    last_boot = None
    while True:
        with Link(place, "toy", 1000, is_announced=False, last_boot=last_boot) as link:
            link.hears_others(8 * timing.beat_s)
            with (folder / f"{place.region}-{os.getpid()}.jsonl").open("a") as out:
                toy = Toy(link, out)

                try:
                    toy.begin(link.join(60))
                    toy.write(joined=toy.step, life=link.boot)
                    while True:
                        toy.turn(settings["step_s"], settings["spoils_at"])
                except LeftBehindError as error:
                    toy.write(left=str(error))
                    last_boot = link.boot
                    settings["spoils_at"] = None
                except SupersededError as error:
                    toy.write(ended=str(error))
                    print(error, file=sys.stderr)
                    return 2


if __name__ == "__main__":
    sys.exit(main())
