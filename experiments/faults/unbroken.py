"""The reference of a run with kills: the same training in one process without kills."""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from cocodc_jax.files import read_table
from cocodc_jax.netlab import children
from cocodc_jax.run.elastic_flags import NOT_ELASTIC, ElasticFlags

from .. import commands


def unbroken_flags(train_flags: Sequence[str]) -> list[str]:
    """Return the flags of the same training in one process, without paced steps."""
    # The last value of a flag counts; elastic flags have no meaning in one process.
    fields = dataclasses.fields(ElasticFlags)
    unset = [f"--{field.name}={getattr(NOT_ELASTIC, field.name)}" for field in fields]
    return [*train_flags, *unset, "--exchange=outer", "--step_seconds=0"]


def unbroken_loss(train_flags: Sequence[str], workdir: pathlib.Path) -> float:
    """Train in one process with all regions; return the outer parameters' loss."""
    command = [*commands.python_m("train"), *unbroken_flags(train_flags)]
    log = workdir / "output.log"
    workdir.mkdir(parents=True, exist_ok=True)
    print(f"the unbroken run trains first; {log}", file=sys.stderr, flush=True)
    code = children.run([*command, f"--workdir={workdir}"], log=log)
    if code or not (workdir / "summary.json").exists():
        lines = children.said(log.read_text(errors="replace"))
        last = lines[-1].removeprefix("error: ") if lines else "it printed nothing"
        raise ValueError(f"the unbroken run ended with {code}: {last}")
    return read_table(workdir / "summary.json")["eval_loss_outer"]
