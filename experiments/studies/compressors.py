"""Measures the error of compressors on real pseudo-gradients, by kind of tensor.

    python -m experiments.studies.compressors --preset=tiny --compressors=int2,stat2

Regions train without exchange. The progress of each in `--interval` steps is its
pseudo-gradient x. The relative error of a compressor is ||decoded - x|| / ||x||. The
table also has normal and Laplace random numbers, and the values that a sparse method
quantizes: the 128 largest of each 64 x 64 chunk.
"""

import functools
import math
import pathlib
import tempfile

import jax
import numpy as np
from rich.console import Console

import cocodc_jax as cc
from cocodc_jax.data.streams import cut_to_sizes
from cocodc_jax.run import flags
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.session import Session
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.layers import named_leaves

from .. import program

WITHOUT = ("method", "steps", "exchange", "adopt_from", "eval_every", "spike_zscore")
_LARGEST = compression.chunked_top_k(k=128)
TOP = "top 128 of 4096"
NUM_RANDOM = 1 << 18

Tensors = dict[str, list[np.ndarray]]


def main() -> None:
    """Read the flags, train, print the table."""
    console = Console(highlight=False)
    with flags.usage_errors():
        flags.check_one_process()
        compressors = _compressors()
        interval, rounds = flags.value("interval"), flags.value("rounds")
        for name in ("interval", "rounds"):
            if flags.value(name) < 1:
                raise ValueError(f"{name}={flags.value(name)} must be at least 1")
        config = flags.config(WITHOUT, steps=interval * rounds).replace(method="apart")
        folder = flags.value("workdir") or tempfile.mkdtemp(prefix="compressors_")
        session = prepare(config, pathlib.Path(folder))
    kinds = random_numbers() | pseudo_gradients(session, interval, rounds)
    rows = [
        (kind, *(f"{relative_error(c, tensors):.3f}" for c in compressors.values()))
        for kind, tensors in kinds.items()
    ]
    console.print(program.table(("numbers", *compressors), rows))
    console.print(
        f"Relative errors of {rounds} x {config.run.regions} pseudo-gradients of "
        f"{interval} steps, preset {config.preset}, seed {config.run.seed}."
    )


def _compressors() -> dict[str, Compressor]:
    whole = flags.value("compressors")
    texts = list(filter(None, whole.split(",")))
    if not texts:
        raise ValueError(f"compressors={whole} is empty; name some")
    try:
        return {text: compression.parse(text) for text in texts}
    except ValueError as error:  # Of the argument that it is elsewhere.
        why = str(error).removeprefix("compress=")
        raise ValueError(f"compressors={whole}: {why}") from error


def random_numbers() -> Tensors:
    """Return normal and Laplace numbers, one tensor each."""
    rng = np.random.default_rng(0)
    return {
        "normal": [rng.normal(size=NUM_RANDOM).astype(np.float32)],
        "Laplace": [rng.laplace(size=NUM_RANDOM).astype(np.float32)],
    }


def pseudo_gradients(session: Session, interval: int, rounds: int) -> Tensors:
    """Train regions without exchange; return pseudo-gradients by kind of tensor."""
    program, key = session.program, jax.random.key(session.config.run.seed)
    params = session.init_params(jax.random.fold_in(key, 0))
    state = program.init(params, jax.random.fold_in(key, 1))
    sizes, full = program.regions.batch_sizes, session.config.data.batch_per_region
    stream = cut_to_sizes(session.text.train_stream(), sizes, full)
    before = jax.device_get(state.region.params)
    kinds: Tensors = {}
    for _ in range(rounds):
        for after, _ in cc.run_steps(program, state, stream, interval):
            state = after
        now = jax.device_get(state.region.params)
        delta = jax.tree.map(lambda old, new: old - new, before, now)
        for path, regions in named_leaves(delta):
            for x in regions:
                kinds.setdefault(kind_of(path), []).append(x)
                kinds.setdefault(TOP, []).append(largest(x))
        before = now
    top = kinds.pop(TOP)
    return dict(sorted(kinds.items())) | {TOP: top}


def kind_of(path: str) -> str:
    """Return the kind of a tensor: a part of the network, or a norm's scale.

    >>> kind_of("blocks/0/attention/query"), kind_of("blocks/mlp_norm/scale")
    ('attention', 'norms')
    """
    if "norm" in path:
        return "norms"
    parts = [part for part in path.split("/") if not part.isdecimal()]
    return parts[1] if parts[0] == "blocks" and len(parts) > 1 else parts[0]


def largest(x: np.ndarray) -> np.ndarray:
    """Return the numbers of a tensor that SparseLoCo sends, before quantization."""
    sent = np.asarray(_decoded(_LARGEST, x))
    return sent[sent != 0]


def relative_error(compressor: Compressor, tensors: list[np.ndarray]) -> float:
    """Return the norm of the error over all tensors, relative to their norm."""
    lost = sum(_squares(x - np.asarray(_decoded(compressor, x))) for x in tensors)
    return math.sqrt(lost / sum(map(_squares, tensors)))


@functools.partial(jax.jit, static_argnums=0)
def _decoded(compressor: Compressor, x: jax.Array) -> jax.Array:
    key = jax.random.key(0)
    return compressor.decode(compressor.encode(x, compressor.init(x), key)[0])


def _squares(x: np.ndarray) -> float:
    return float(np.sum(np.square(x, dtype=np.float64)))


def define() -> None:
    """Define the program's flags."""
    flags.define(
        WITHOUT,
        "Folder for config.json; the table is printed only. Default: one in /tmp.",
    )
    program.define(
        ("compressors", "int2,stat2", "Compressors, comma-separated."),
        ("interval", 40, "Steps of a pseudo-gradient."),
        ("rounds", 3, "Pseudo-gradients; a region trains interval x rounds steps."),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
