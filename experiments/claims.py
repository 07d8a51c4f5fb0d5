r"""Checks what the field claims, and what we claim, by results on equal terms.

    python -m experiments.claims
    python -m experiments.claims --only=NAME
    python -m experiments.claims --only=NAME --run --workdir=DIR

A claim is a file of experiments/claims: the sentence, its source, what was run here,
the measure, and the rule that makes a verdict of an interval over the seeds
(`checking/claim.py` has the format). All are checked by the results in the repository,
which a wheel does not have: `--results` names their folder.

With `--run` the commands of a claim run anew in DIR, at the cost that the table states,
and their result is checked. The same command resumes, as a sweep does.
`--markdown` prints the table of docs/results/claims.md.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from cocodc_jax.netlab import children
from cocodc_jax.report.units import format_duration
from cocodc_jax.run.resume import make_folder

from . import commands, program
from .checking import claim, measures, table

OWN_FLAGS = (
    ("only", str, "name of one claim"),
    ("run", False, "run the commands of --only, and check what they write"),
    ("workdir", pathlib.Path, "folder for --run"),
    ("results", measures.FOLDER, "folder with the files of results"),
    ("markdown", False, "print the table in Markdown"),
)


def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    values = program.own_flags(*OWN_FLAGS)
    with program.usage_errors(values):
        program.parse(values, argv, __doc__, has_words=False)
        files = measures.Results(pathlib.Path(values.results))
        claims = claim.read_all()
        if values.only is not None:
            claims = [claim.only(claims, values.only)]

        if values.run:
            _check_run(values.only, values.workdir, claims)
            make_folder(pathlib.Path(values.workdir))
        elif values.workdir:
            raise ValueError(
                f"--workdir={values.workdir} has a meaning with --run only"
            )

    if values.run:
        began_s = time.perf_counter()
        code, files = _run(claims[0], pathlib.Path(values.workdir), files)
        if code:
            return code
        took_s = time.perf_counter() - began_s
        print(f"{claims[0].name} ran for {format_duration(took_s)}", file=sys.stderr)

    with program.usage_errors(values):
        checked = [table.check(one, files) for one in claims]
    if values.markdown:
        print(table.page(checked), end="")
    else:
        _show(checked)
    return 0


def _check_run(
    only: str | None, workdir: str | None, claims: Sequence[claim.Claim]
) -> None:
    """Refuse to run all claims, or one that cannot be tried."""
    if only is None:
        raise ValueError("--run needs --only=NAME: the claim whose commands are run")
    if not workdir:
        raise ValueError("workdir=None is missing; name a folder for --run")
    if not claims[0].is_tried:
        raise ValueError(f"--only={only} cannot be tried here: {claims[0].why}")


def _run(
    one: claim.Claim, workdir: pathlib.Path, files: measures.Results
) -> tuple[int, measures.Results]:
    """Run the commands of a claim; return the exit code, and where results are."""
    cost = table.cost(one)
    num = len(one.commands)
    print(f"{one.name}: {num} commands, {cost} of a core", file=sys.stderr, flush=True)
    for words in one.commands:
        name, *flags = (word.replace("DIR", str(workdir)) for word in words)
        code = children.run([*commands.python_m(name), *flags])
        if code:
            print(f"error: {name} ended with {code}", file=sys.stderr)
            return code, files

    if not one.commands:
        return 0, files
    last_program = one.commands[-1][0]
    path = workdir / claim.WRITTEN[last_program]
    new = {one.parts[0].arguments["results"]: path}
    return 0, dataclasses.replace(files, instead=new)


def _show(checked: Sequence[table.Checked]) -> None:
    """Print one claim in full, or a line for each."""
    console = Console(highlight=False)
    if len(checked) > 1:
        lines = table.terminal_lines(checked)
        console.print(program.table(table.terminal_heads(), lines))
        return

    row = checked[0]
    console.print(f"{row.claim.name}: {row.verdict}", style="bold")
    console.print(f"{row.claim.claim} ({row.claim.source})")
    for line in row.lines() or [row.claim.why]:
        console.print(f"- {line}")


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
