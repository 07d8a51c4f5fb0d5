"""Place batches of a scan, `[T, R, B, ...]`, on a mesh, and scan over them.

On a CPU, compiling the inner steps takes as long as running hundreds of them. Every
length of a `lax.scan` is a separate program, and events, evaluations and checkpoints
cut a run into many lengths: eight with H 100, N 8, tau 5 and an evaluation at every
25th step. A loop whose number of steps is an argument is one program for all lengths.
Its inputs, if small, are padded to a multiple of `LENGTH_BUCKET`; the padding is never
read. On accelerators scans have a static length, which the compiler may use to plan
transfers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine import transfer
from cocodc_jax.engine.mesh import REGION, batch_axes
from cocodc_jax.transforms.layers import named_leaves

PyTree = Any

LENGTH_BUCKET = 10  # Steps; divides most intervals.
_MOST_BYTES = 1 << 24  # Of padding that is cheaper than another program.


def scan(
    step: Callable, state: PyTree, xs: PyTree, num_steps: jax.Array | None = None
) -> tuple[PyTree, PyTree]:
    """Run `jax.lax.scan` over the first `num_steps` of `xs`, leaves `[room, ...]`.

    `num_steps` is an int32 scalar, at most `room`; None runs all with `lax.scan`.
    Outputs beyond `num_steps` are zeros.
    """
    if num_steps is None:
        return jax.lax.scan(step, state, xs)

    traced_step = jax.jit(step, inline=True)  # Traced once, not twice.
    _, out = jax.eval_shape(traced_step, state, jax.tree.map(lambda x: x[0], xs))
    room = jax.tree.leaves(xs)[0].shape[0]
    outs = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), out)

    def body(i: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, outs = carry
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
        new_state, out = traced_step(state, jax.tree.map(take, xs))
        new_outs = jax.tree.map(
            lambda to, x: jax.lax.dynamic_update_index_in_dim(to, x, i, 0), outs, out
        )
        return new_state, new_outs

    return jax.lax.fori_loop(0, num_steps, body, (state, outs))


def padded_length(num_steps: int) -> int:
    """Return the number of steps that inputs are padded to.

    >>> [padded_length(num_steps) for num_steps in (1, 10, 11)]
    [10, 10, 20]
    """
    return -(-num_steps // LENGTH_BUCKET) * LENGTH_BUCKET


def takes(xs: PyTree) -> bool:
    """Return whether inputs `[num_steps, ...]` are small enough to pad."""
    leaves = jax.tree.leaves(xs)
    num_steps = leaves[0].shape[0]
    size = sum(x.size * np.dtype(x.dtype).itemsize for x in leaves)
    missing = padded_length(num_steps) - num_steps
    return size * missing <= _MOST_BYTES * num_steps


def padded(xs: PyTree, num_steps: int) -> PyTree:
    """Pad host arrays `[num_steps, ...]` with zeros."""
    missing = padded_length(num_steps) - num_steps
    if not missing:
        return xs
    return jax.tree.map(
        lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]), xs
    )


class Batches:
    """Places batches on the mesh, B over the axes of `batch_axes`.

    If it `pads` them, the program receives the number of real steps, see the module.
    """

    def __init__(self, mesh: Mesh, num_regions: int, pads: bool):
        self._mesh = mesh
        self._num_regions = num_regions
        self.length_bucket = LENGTH_BUCKET if pads else None
        self._everywhere = NamedSharding(mesh, P())
        # Placed on the mesh once.
        self._number = functools.cache(
            lambda number: transfer.put(np.int32(number), self._everywhere)
        )

    @functools.cached_property
    def own_regions(self) -> int:
        """Number of regions that this process computes at least a part of."""
        process = jax.process_index()
        axis = self._mesh.axis_names.index(REGION)
        shards = np.moveaxis(self._mesh.devices, axis, 0)
        num_own = sum(
            any(d.process_index == process for d in shard.flat) for shard in shards
        )
        return num_own * self._num_regions // len(shards)

    def num_steps(self, batches: PyTree) -> int:
        """Return T; see `check_batches`."""
        return check_batches(batches, self._num_regions, self.own_regions)

    def put(self, batches: PyTree) -> PyTree:
        """Place host batches, which have full rows of this process's regions."""

        def put_leaf(x: Any) -> jax.Array:
            sharding = self._sharding(np.ndim(x))
            if _is_on_mesh(x) or sharding.is_fully_addressable:
                return jax.device_put(x, sharding)
            return transfer.put_own(np.asarray(x), sharding, self._num_regions, axis=1)

        return jax.tree.map(put_leaf, batches)

    def for_steps(self, batches: PyTree) -> tuple[PyTree, Any]:
        """Return batches in the form that the inner steps take, or their shapes.

        On a single device, host batches are passed directly to the program, which takes
        a fifth of the time of placing them first. If `jax.transfer_guard` forbids that
        implicit transfer, they are placed.
        """
        leaves = jax.tree.leaves(batches)
        if isinstance(leaves[0], jax.ShapeDtypeStruct):
            return self.abstract(batches)

        number = None
        is_host = all(isinstance(x, np.ndarray) for x in leaves)
        if is_host and self._pads(batches):
            num_steps = len(leaves[0])
            batches = padded(batches, num_steps)
            number = self._number(num_steps)

        guard = jax.config.jax_transfer_guard_host_to_device  # pyright: ignore
        if self._mesh.size == 1 and is_host and guard in (None, "allow"):
            return batches, number
        return self.put(batches), number

    def abstract(self, batches: PyTree) -> tuple[PyTree, jax.ShapeDtypeStruct | None]:
        """Return shapes, dtypes and shardings of the result of `for_steps`."""
        pads = self._pads(batches)

        def shape_of(x: Any) -> jax.ShapeDtypeStruct:
            room = padded_length(x.shape[0]) if pads else x.shape[0]
            return jax.ShapeDtypeStruct(
                (room, *x.shape[1:]), x.dtype, sharding=self._sharding(x.ndim)
            )

        number = None
        if pads:
            number = jax.ShapeDtypeStruct((), np.int32, sharding=self._everywhere)
        return jax.tree.map(shape_of, batches), number

    def _pads(self, batches: PyTree) -> bool:
        return self.length_bucket is not None and takes(batches)

    def _sharding(self, ndim: int) -> NamedSharding:
        inside = (batch_axes(self._mesh),) if ndim > 2 else ()
        return NamedSharding(self._mesh, P(None, REGION, *inside))


def check_batches(batches: PyTree, num_regions: int, own_regions: int) -> int:
    """Return T; raise ValueError if the second axis of batches is not the regions."""
    named = named_leaves(batches)
    if not named:
        raise ValueError("batches has no arrays; give leaves [T, R, B, ...]")

    first, leaf = named[0]
    num_steps = np.shape(leaf)[:1]
    for path, leaf in named:
        shape = np.shape(leaf)
        rows = num_regions if _is_on_mesh(leaf) else own_regions
        who = f"batches has a leaf {path!r} of shape {shape}"

        if shape[:1] == (0,):
            raise ValueError(f"{who}, of no steps; it needs one at least")
        if len(shape) < 2:
            raise ValueError(
                f"{who}, without an axis of regions: leaves are [T, R, B, ...], T "
                f"steps of R = {rows} regions ([R, B, ...] for one step of `run_steps`)"
            )

        if shape[1] == num_regions != rows:
            raise ValueError(
                f"{who}, rows of all {num_regions} regions, but this is one of "
                f"several processes: each gives those of its own regions alone, here "
                f"{rows}"
            )
        if shape[1] != rows:
            whose = "regions" if rows == num_regions else "regions of this process"
            raise ValueError(
                f"{who}, whose second axis must be the {rows} {whose}: leaves are "
                "[T, R, B, ...] ([R, B, ...] for one step of `run_steps`)"
            )

        if shape[:1] != num_steps:
            raise ValueError(
                f"{who}, but a leaf {first!r} has {num_steps[0]} steps along the "
                "first axis: all leaves have as many"
            )
    return num_steps[0]


def _is_on_mesh(leaf: Any) -> bool:
    """Return whether a leaf has the rows of all regions, not of this process's alone.

    It has if it is sharded over devices of several processes, or is only a shape.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return True
    is_real = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return is_real and not leaf.is_fully_addressable
