"""Devices that compile and run the programs of a run, or a recorder that lists them.

With a `Recorder` the code that trains runs a schedule with shapes in place of arrays.
So the listed programs, which are compiled ahead, are those that a run compiles.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Sharding

from cocodc_jax.engine import transfer

PyTree = Any


class LoweredProgram(NamedTuple):
    """One compiled program of a run."""

    name: str  # What it does, with the fragment's number if it handles one fragment.
    program: Any  # Result of `jax.jit`.
    arguments: tuple  # Shapes, dtypes and shardings, for `program.lower(*arguments)`.
    sent_bytes: int = 0  # That one region sends in it, as the run counts them.
    num_steps: int = 0  # Inner steps in it.
    options: Mapping[str, Any] = {}  # Compiler options.


class Devices:
    """Compiles programs, runs them, and moves arrays between devices."""

    is_real = True

    def jit(
        self, function: Callable, name: str = "", sent_bytes: int = 0, **options: Any
    ) -> Callable:
        """Compile by `jax.jit`; a `Recorder` lists programs that have a name."""
        del name, sent_bytes
        return jax.jit(function, **options)

    put = staticmethod(transfer.put)
    move = staticmethod(transfer.move)
    borrow = staticmethod(transfer.borrow)
    gather_rows = staticmethod(transfer.gather_rows)

    def __init__(self):
        # Places the regions' weights in a mean, once for all syncs.
        self.weights = functools.lru_cache(maxsize=256)(self._weights)

    def _weights(self, weights: tuple[float, ...], sharding: Sharding) -> jax.Array:
        return self.put(np.array(weights, float), sharding)

    def at(self, tree: PyTree, index: int) -> PyTree:
        """Select an entry of the leading axis of every leaf."""
        return jax.tree.map(lambda x: x[index], tree)

    def read(self, x: jax.Array) -> np.ndarray:
        """Read this process's rows of an array, or a scalar; waits for it."""
        return np.asarray(x) if x.ndim == 0 else transfer.local_rows(x)


class Recorder(Devices):
    """Evaluates shapes and lists the programs that are called, but runs none."""

    is_real = False

    def __init__(self):
        super().__init__()
        # By name, with the arguments of their first call.
        self.programs: dict[str, LoweredProgram] = {}

    def jit(
        self, function: Callable, name: str = "", sent_bytes: int = 0, **options: Any
    ) -> Callable:
        """Return a function that records its call and evaluates shapes."""
        program: Any = jax.jit(function, **options)

        def record(*arguments: Any) -> Any:
            if name and name not in self.programs:
                self.programs[name] = LoweredProgram(
                    name=name,
                    program=program,
                    arguments=jax.tree.map(_shape, arguments),
                    sent_bytes=sent_bytes,
                    options=options.get("compiler_options") or {},
                )
            return program.eval_shape(*arguments)

        return record

    @staticmethod
    def put(tree: PyTree, shardings: Any) -> PyTree:
        """Return shapes with these shardings."""
        if isinstance(shardings, Sharding):
            shardings = jax.tree.map(lambda _: shardings, tree)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(
                np.shape(x), _canonical_dtype(x), sharding=sharding
            ),
            tree,
            shardings,
        )

    move = borrow = gather_rows = put

    def at(self, tree: PyTree, index: int) -> PyTree:
        """Return the shapes of an entry."""
        del index
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)

    def read(self, x: Any) -> np.ndarray:
        """Return ones for measurements, and zeros for verdicts and counts."""
        return np.full(x.shape, np.issubdtype(x.dtype, np.floating), x.dtype)


def _canonical_dtype(x: Any) -> Any:
    # Arrays of PRNG keys, which a trainer's state may have, keep their extended dtype.
    return jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    # Results whose sharding is the compiler's choice have that of no device.
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        sharding = None
    return jax.ShapeDtypeStruct(np.shape(x), _canonical_dtype(x), sharding=sharding)
