"""Trains regions without exchange and merges them late: an average, and ensembles.

    python -m experiments.studies.merge_experts --preset=tiny --workdir=DIR

Trains method `apart`, or uses the finished run in DIR. Each region has its own sources
unless --partition=iid. Evaluates on the same held-out batches as all programs: each
expert, the average of their parameters, even mixtures, and mixtures weighted by a
router that reads the first --prefix_tokens of a sequence. Writes merge.json to DIR. The
same command resumes an interrupted one.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console

from cocodc_jax import models
from cocodc_jax.core.state import TrainState
from cocodc_jax.data import load
from cocodc_jax.files import write_whole
from cocodc_jax.methods import METHODS
from cocodc_jax.run import flags
from cocodc_jax.run.attend import Tracking
from cocodc_jax.run.config import TrainConfig, dumps
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.resume import ResumeError, only_writer
from cocodc_jax.run.session import CHECKPOINTS, RUN_ERRORS, Session
from cocodc_jax.train import experts
from cocodc_jax.train.checkpoint import Checkpoints
from cocodc_jax.train.evaluate import make_evaluate

from .. import program

METHOD = "apart"
WITHOUT = ("method", "partition")


@dataclasses.dataclass(frozen=True)
class Routing:
    """How a router weighs experts."""

    top_k: int  # Experts that a sparse router keeps.
    prefix_tokens: int  # P, predicted tokens that a router reads.
    temperature: float

    def check(self, config: TrainConfig) -> None:
        """Check the numbers for a run."""
        regions, length = config.run.regions, config.data.sequence_length
        if regions < 2:
            raise ValueError(
                f"regions={regions} leaves nothing to merge; use 2 or more"
            )
        if not 1 <= self.top_k <= regions:
            raise ValueError(
                f"top_k={self.top_k} must be from 1 to regions={regions}, the experts"
            )
        if not 1 <= self.prefix_tokens < length:
            raise ValueError(
                f"prefix_tokens={self.prefix_tokens} must be from 1 to {length - 1}: a "
                f"router chooses for the rest of sequence_length={length}"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be positive")


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one way to merge."""

    loss: float  # Nats per token over full sequences.
    loss_after_prefix: float  # The same without the tokens that a router reads.
    passes_per_token: float  # Forward passes of one expert's size.


def main() -> None:
    """Read the flags, train, merge, write."""
    console = Console()
    open_text = functools.lru_cache(load)
    with flags.usage_errors():
        flags.check_one_process()  # Several can train --method=apart before.
        references = _references()
        config = flags.config(WITHOUT, [METHOD, *references])
        config = config.replace(method=METHOD, partition=flags.value("partition"))
        each = (config.replace(method=name) for name in (METHOD, *references))
        flags.check_optimizers(each)
        routing = _routing(config)
        default = f"runs/merge_{config.preset}_{config.data.partition}"
        workdir = pathlib.Path(flags.value("workdir") or default)
        tracking = flags.read(Tracking)
        folders = {METHOD: workdir}
        folders |= {name: workdir / "references" / name for name in references}
        ready: list[Session] = []
        for name, folder in folders.items():
            own = config.replace(method=name)
            ready.append(prepare(own, folder, open_text, ready, tracking=tracking))
    try:
        for session in ready:
            steps = session.train(console)["steps"]
            if steps < session.config.run.steps:
                method = session.config.method.method
                print(f"stopped: {method} at step {steps}; the same command resumes "
                      "there")  # fmt: skip
                sys.exit(flags.STOPPED)
        rows = _merge(ready[0], routing)
        for session in ready[1:]:
            method = session.config.method.method
            rows[method] = _average(session, routing, _finished(session))
    except RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    _write(rows, config, routing, workdir, console)


def _references() -> list[str]:
    names = [name for name in flags.value("references").split(",") if name]
    for name in names:
        if name not in METHODS or name == METHOD:
            raise ValueError(
                f"references={','.join(names)} names {name!r}; use some of "
                f"{sorted(METHODS.keys() - {METHOD})}"
            )
    return names


def _routing(config: TrainConfig) -> Routing:
    names = ("top_k", "prefix_tokens", "temperature")
    k, prefix, temperature = map(flags.value, names)
    if prefix is None:
        prefix = max(1, config.data.sequence_length // 4)
    routing = Routing(k, prefix, temperature)
    routing.check(config)
    return routing


def _write(
    rows: dict[str, Row],
    config: TrainConfig,
    routing: Routing,
    workdir: pathlib.Path,
    console: Console,
) -> None:
    merged = {
        "preset": config.preset,
        "partition": config.data.partition,
        "seed": config.run.seed,
        "regions": config.run.regions,
        "steps": config.run.steps,
        "routing": dataclasses.asdict(routing),
        "models": {name: dataclasses.asdict(row) for name, row in rows.items()},
    }
    write_whole(workdir / "merge.json", dumps(merged))
    heads = ("model", "loss", "perplexity", "loss after prefix", "passes/token")
    lines = []
    for name, row in rows.items():
        losses = f"{row.loss:.4f}", f"{math.exp(row.loss):.3f}"
        rest = f"{row.loss_after_prefix:.4f}", f"{row.passes_per_token:.2f}"
        lines.append((name, *losses, *rest))
    console.print(program.table(heads, lines))
    console.print(
        f"Held-out text; routers choose from {routing.prefix_tokens} tokens. "
        f"Files: {workdir}",
        highlight=False,
    )


def _merge(session: Session, routing: Routing) -> dict[str, Row]:
    """Evaluate every way to merge the experts of a finished run."""
    state = _finished(session)
    tokens, prefix = _eval_tokens(session), routing.prefix_tokens
    score = experts.make_score(
        functools.partial(models.apply, session.model),
        session.mesh,
        session.program.num_regions,
    )
    scores = jax.device_get(score(state.region.params, tokens))
    prefixes = scores.experts[..., :prefix]
    weights = experts.posterior(prefixes, routing.temperature)
    passes = float(len(scores.experts))
    return {
        **{f"expert {r}": _row(x, prefix, 1.0) for r, x in enumerate(scores.experts)},
        "mean of experts": _row(scores.experts, prefix, 1.0),
        "parameter average": _average(session, routing, state),
        "even mixture": _row(experts.mixture(scores.experts), prefix, passes),
        "mean of logits": _row(scores.mean_logits, prefix, passes),
        **_routed(scores.experts, weights, routing),
    }


def _finished(session: Session) -> TrainState:
    """Return the state of a finished run."""
    keep = session.config.run.keep_checkpoints
    with (
        only_writer(session.own_dir),
        contextlib.closing(session.text.train_stream()) as stream,
        Checkpoints(session.workdir / CHECKPOINTS, keep) as saved,
    ):
        state = session.begin(saved, stream)[0]
        if state.step != session.config.run.steps:
            raise ResumeError(
                f"the run in {session.workdir} is at step {state.step} of "
                f"{session.config.run.steps}, as its last checkpoint was damaged; the "
                "same command trains the rest again"
            )
        return state


def _average(session: Session, routing: Routing, state: TrainState) -> Row:
    """Return the average of the regions' parameters; its loss is `eval_loss`."""
    params = session.program.mean_params(state)

    def after_prefix(params, tokens, _):
        logits = models.apply(session.model, params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses[:, routing.prefix_tokens :].mean(), {}

    evaluate = make_evaluate(after_prefix, session.mesh, _eval_tokens(session))
    return Row(float(session.evaluate(params)), float(evaluate(params)), 1.0)


def _routed(log_probs: Any, log_weights: jax.Array, routing: Routing) -> dict[str, Row]:
    """Return the router with all experts and, if that is fewer, with the best k."""
    (regions, *_, length), prefix = log_probs.shape, routing.prefix_tokens
    rows = {}
    for k in sorted({routing.top_k, regions}, reverse=True):
        kept = experts.keep_top(log_weights, k)
        passes = experts.passes_per_token(regions, k, prefix, length)
        mixed = experts.routed(log_probs, kept, prefix)
        label = "posterior" if k == regions else f"posterior, top {k}"
        rows[label] = _row(mixed, prefix, passes)
    return rows


def _eval_tokens(session: Session) -> np.ndarray:
    tokens = session.text.eval_tokens(session.config.run.eval_batches)
    return _cut(tokens, session.config)


def _cut(tokens: np.ndarray, config: TrainConfig) -> np.ndarray:
    """Yield batches `[E, B, L + 1]` small enough for their logits to fit in memory."""
    batch, length = tokens.shape[1:]
    axis, most = config.run.data_axis, config.model.loss_chunk_tokens // (length - 1)
    sizes = [n for n in range(axis, batch + 1, axis) if batch % n == 0 and n <= most]
    return tokens.reshape(-1, max(sizes, default=axis), length)


def _row(log_probs: Any, prefix: int, passes: float) -> Row:
    losses = -np.asarray(log_probs, np.float64)
    return Row(float(losses.mean()), float(losses[..., prefix:].mean()), passes)


def define() -> None:
    """Define the program's flags."""
    flags.define(
        WITHOUT,
        "Folder of the runs and the results; they resume there. Default: "
        "runs/merge_PRESET_PARTITION.",
    )
    flags.define_fields(Tracking)
    program.define(
        ("partition", "source", "How regions share the corpus: source or iid."),
        ("top_k", 2, "Experts that a sparse router keeps."),
        ("prefix_tokens", int, "Tokens that a router reads. Default: a quarter."),
        ("temperature", 1.0, "Temperature of the posterior; 1 is Bayes' rule."),
        ("references", "", "Methods to compare with, comma-separated."),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
