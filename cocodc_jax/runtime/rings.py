"""A sum over the region axis by several rings at once, each with its own share.

The numbers are laid end to end and dealt to the rings, and each share is cut into a
chunk for every place. With q a place's position on a ring of D places, at every step
k = 0 .. D - 2 it passes one chunk on to its next:

    summing     chunk q - k, to which the next adds its own; in the end place q has the
                whole sum of chunk q + 1
    gathering   chunk q + 1 - k, which the next keeps

so each place sends 2 (D - 1) / D of the numbers. Each chunk is summed once, and copied:
all places end with the same bits. Orders of the rings: `sync/rings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime.mesh import REGION
from cocodc_jax.sync.rings import Rings

PyTree = Any


def make_ring_sum(mesh: Mesh, rings: Rings) -> Callable[[PyTree], PyTree]:
    """Makes the sum over the places along the region axis.

    Args:
      mesh: the inner mesh.
      rings: how many, and their orders.

    Returns:
      `ring_sum(tree)`: leaves `[D, ...]`, one entry a place, to their sums `[...]`.
    """
    num_places = mesh.shape[REGION]
    strides = rings.strides(num_places)

    def of_place(tree):
        flat, restore = ravel_pytree(jax.tree.map(lambda x: x[0], tree))
        chunk = rings.chunk_size(flat.size, num_places)
        shape = (rings.num, num_places, chunk)
        padded = jnp.pad(flat, (0, rings.num * num_places * chunk - flat.size))
        shares = tuple(padded.reshape(shape))
        shares = _ring_sums(shares, strides, num_places)
        return restore(jnp.stack(shares).ravel()[: flat.size])

    # Every place has copies of the same sums, but a permutation's result is typed as
    # varying and nothing can say otherwise: so no check here, in a program with
    # nothing else in it. A test compares the places bit for bit.
    return jax.shard_map(
        of_place,
        mesh=mesh,
        axis_names={REGION},
        in_specs=P(REGION),
        out_specs=P(),
        check_vma=False,
    )


def ring_bytes(rings: Rings, shapes: PyTree, num_regions: int) -> int:
    """Bytes that a region sends to sum a tree of these shapes, padding included.

    Args:
      rings: by which.
      shapes: of one region.
      num_regions: M, each taken to be a place of its own, also where places here hold
        several.
    """
    flat = jax.eval_shape(lambda x: ravel_pytree(x)[0], shapes)
    return rings.num_sent(flat.size, num_regions) * flat.dtype.itemsize


def _ring_sums(shares, strides, num_places):
    """Sums of `[D, chunk]` shares over the places, all rings at every step."""
    place = jax.lax.axis_index(REGION)
    places = range(num_places)
    perms = [[(p, (p + s) % num_places) for p in places] for s in strides]
    # Position q is place q s, so a place's position is it times s inverted.
    positions = [
        place * (pow(s, -1, num_places) if num_places > 1 else 0) for s in strides
    ]

    def pass_on(share, perm, sent):
        return jax.lax.ppermute(share[sent % num_places], REGION, perm)

    def add(k, shares):
        out = []
        for share, perm, q in zip(shares, perms, positions, strict=True):
            got = pass_on(share, perm, q - k)
            out.append(share.at[(q - k - 1) % num_places].add(got))
        return tuple(out)

    def keep(k, shares):
        out = []
        for share, perm, q in zip(shares, perms, positions, strict=True):
            got = pass_on(share, perm, q + 1 - k)
            out.append(share.at[(q - k) % num_places].set(got))
        return tuple(out)

    shares = jax.lax.fori_loop(0, num_places - 1, add, shares)
    return jax.lax.fori_loop(0, num_places - 1, keep, shares)
