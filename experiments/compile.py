r"""Compiles every program of a run for an accelerator, without having one.

    python -m experiments.compile --preset=paper_150m --target=v5e:4x4 --slices=4 \
        --method=cocodc --workdir=DIR

Targets: a slice of TPU chips (v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:8x8, 7x:4x4x4), any
number of --slices, or hosts of eight GPUs (h100:4, h200:4). The regions share the
chips; the data axis takes those that other axes leave. Prints for each program, of one
device: memory, operations, collectives inside and between regions and which of them
span the inner steps, and the least time by a roofline. Writes WORKDIR/compile.json.
The window of each fragment (--overlap) holds the inner steps and takes as long to
compile; --overlap=no shows memory and speed of the inner steps much sooner, and
--programs='start fragment 0' compiles one window alone. Exits with 1 if the run does
not fit, and proposes flags with which it does. Needs the extra `tpu` or `cuda`, and no
accelerator.
"""

import contextlib
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from cocodc_jax.aot import report
from cocodc_jax.aot.job import CompileError, Job, UnknownProgramError
from cocodc_jax.aot.programs import INNER_STEPS, place
from cocodc_jax.aot.targets import Target
from cocodc_jax.chips import CHIPS
from cocodc_jax.files import write_whole
from cocodc_jax.run.build import check_model
from cocodc_jax.run.config import flags
from cocodc_jax.run.config.train_config import dumps
from cocodc_jax.run.resume import make_folder

from . import program

RESULT_FILE = "compile.json"
# Columns of the table, also if it goes to a file.
WIDTH = 160


def main() -> None:
    """Read the flags, compile, print and write the result."""
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    with flags.usage_errors():
        job, workdir = read_flags()

    try:
        result = compile_run(job, console)
    except (CompileError, UnknownProgramError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, CompileError) else flags.USAGE_ERROR)

    write_whole(workdir / RESULT_FILE, dumps(result))
    if not result["fits"]:
        sys.exit(1)


def read_flags() -> tuple[Job, pathlib.Path]:
    """Return the configuration to compile, and the folder of the result."""
    if not flags.given("target"):
        raise ValueError(f"target=None is no machine; use one of {', '.join(CHIPS)}")
    programs = flags.value("programs")
    try:
        re.compile(programs)
    except re.error as error:
        raise ValueError(
            f"programs={programs!r} is not a regular expression ({error}); use a part "
            "of a name, as in 'fragment 0'"
        ) from None

    target = Target.parse(flags.value("target"), flags.value("slices"))
    flags.check_one_process()
    config = place(flags.config(), target, flags.given("data_axis"))
    if config.run.exchange == "elastic":
        raise ValueError("exchange='elastic' has a run for each region; leave it out")

    check_model(config, config.model)
    target.check_installed()
    default = pathlib.Path("runs") / f"compile_{config.preset}_{config.method.method}"
    workdir = pathlib.Path(flags.value("workdir") or default)
    hlo_dir = workdir / "hlo" if flags.value("keep_hlo") else None
    make_folder(workdir)

    if hlo_dir:
        make_folder(hlo_dir)
    return Job(config, target, programs, hlo_dir), workdir


def compile_run(job: Job, console: Console) -> dict[str, Any]:
    """Compile and print; return the content of compile.json."""
    with telling(console) as say:
        about, programs = job.run(
            lambda name, number, total: say(
                f"compiling {name} for {job.target} ({number} of {total})"
            )
        )
        summary = report.summarise(about, programs)
        if not summary["fits"] and flags.value("propose"):
            summary["remedy"] = find_remedy(job, say)

    console.print(report.table(about, programs))
    for line in report.lines(job.config, about, programs, summary):
        console.print(line, soft_wrap=True)
    if not summary["fits"]:
        console.print("[red]It does not fit.[/red]" + _advice(summary))

    config = job.config
    target = job.target
    return {
        "preset": config.preset,
        "method": config.method.method,
        "target": str(target),
        "slices": target.slices,
        **summary,
        "about": about,
        "programs": programs,
        "config": config.to_json(),
    }


@contextlib.contextmanager
def telling(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints progress: in place on a terminal, else in lines."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return

    began_s = time.monotonic()

    def say(text: str) -> None:
        after_s = time.monotonic() - began_s
        print(f"{after_s:6.0f} s  {text}", file=sys.stderr, flush=True)

    yield say


def find_remedy(job: Job, say: Callable[[str], None]) -> str | None:
    """Return the first proposed flags with which the inner steps fit, if any."""
    for text, config in report.remedies(job.config):
        try:  # Whether a region's devices can share the model.
            check_model(config, config.model)
        except ValueError:
            continue

        say(f"does it fit with {text}?")
        try:
            _, programs = Job(config, job.target, f"^{INNER_STEPS}$").run()
        except CompileError:  # A compiler that dies has not shown that it fits.
            continue

        if all(program["fits"] for program in programs):
            return text

    return None


def _advice(summary: dict[str, Any]) -> str:
    if "remedy" not in summary:
        return ""
    if summary["remedy"] is None:
        return " None of the flags tried makes it fit; use a larger slice."
    return f" The inner steps would fit with {summary['remedy']}"


def define() -> None:
    """Define the flags."""
    flags.define(workdir="Folder of the results. Default: runs/compile_PRESET_METHOD.")
    program.define(
        ("target", str, "Machine: v5e:4x4, a slice, or h100:4, hosts of 8 GPUs."),
        ("slices", 1, "Slices of that shape, joined by their hosts."),
        ("propose", True, "Whether to search for flags with which the run fits."),
        (
            "programs",
            "",
            "Regular expression of the names of the programs to compile, as in "
            "'start fragment 0'; all by default.",
        ),
        ("keep_hlo", False, "Whether to write the scheduled programs to hlo/."),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
