r"""Measures what elastic regions cost in step time while none fails.

    python -m experiments.route_cost --regions=2 --pairs=2 --workdir=DIR -- \
        --preset=smoke --steps=300

The same training runs on this machine in pairs: with one process per region on the
outer mesh, and with one job per region. The first of a pair alternates. Prints and
writes to DIR/route_cost.json the seconds of an inner step of both, and their ratio for
each pair. Seconds include waits for means, and exclude turns that compiled.
"""

import json
import pathlib
import statistics
import sys
from collections.abc import Sequence

from cocodc_jax.files import read_table, write_whole
from cocodc_jax.netlab import children
from cocodc_jax.run import flags
from cocodc_jax.run.build import check_elastic
from cocodc_jax.run.config import dumps
from cocodc_jax.run.resume import make_folder

from . import commands, program
from .train import read_flags

_SUMMARY = {"outer": "summary.json", "elastic": "region_0/summary.json"}


def step_seconds(
    route: str, train: Sequence[str], workdir: pathlib.Path, tokens_per_step: int
) -> float:
    """Train, and return the seconds of a step."""
    own = ["--elastic"] if route == "elastic" else []
    command = [*commands.python_m("launch_local"), *own, "--", *train]
    log = workdir.with_suffix(".log")
    print(f"training in {workdir}; {log}", file=sys.stderr, flush=True)
    code = children.run([*command, f"--workdir={workdir}"], log=log)
    if code:
        lines = children.said(log.read_text(errors="replace"))
        said = lines[-1] if lines else "it printed nothing"
        raise ValueError(f"the run with {route} ended with {code}: {said}")
    rate = read_table(workdir / _SUMMARY[route])["tokens_per_second"]
    if not rate:
        raise ValueError("the run is too short to be timed; raise --steps")
    return tokens_per_step / rate


def main(argv: Sequence[str]) -> int:
    """Run the program."""
    own = program.own_flags(
        ("regions", 2, "regions that train"),
        ("pairs", 2, "runs of each kind"),
        ("workdir", str, "folder of the runs"),
        regions=1,
        pairs=1,
    )
    flags.define()
    with flags.usage_errors():
        if (train := program.parse(own, argv, __doc__)) is None:
            return 0
        if not own.workdir:
            raise ValueError("workdir=None is missing; name a folder")
        flags.parse([argv[0], *train])
        flags.check_not_given(("regions", "workdir"))
        train += [f"--regions={own.regions}"]
        flags.parse([argv[0], *train])
        config, _ = read_flags()
        check_elastic(config)
        workdir, tokens = pathlib.Path(own.workdir), config.tokens_per_step
        make_folder(workdir)
        found: dict[str, list[float]] = {"outer": [], "elastic": []}
        for pair in range(own.pairs):
            for route in [*found][:: 1 if pair % 2 == 0 else -1]:
                folder = workdir / f"{route}_{pair}"
                found[route].append(step_seconds(route, train, folder, tokens))
                print(json.dumps({route: found[route][-1]}), file=sys.stderr)
    pairs = zip(found["elastic"], found["outer"], strict=True)
    ratios = [elastic / outer for elastic, outer in pairs]
    result = {
        "step_s": found,
        "elastic_over_outer": ratios,
        "median": statistics.median(ratios),
        "flags": train,
    }
    write_whole(workdir / "route_cost.json", dumps(result))
    print(dumps(result), end="")
    return 0


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
