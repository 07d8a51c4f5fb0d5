"""What regions exchange at every inner step, in place of their own gradient.

Every region turns its gradient into a message; from all regions' messages each makes
the same gradient and gives it to its inner optimizer. Data parallelism is the case in
which the message is the gradient and what is made of the messages is their mean:

    message_m, state_m = send(gradient_m, state_m);    gradient = receive(messages)

Each is a pure function of one region's tree; the runtime maps `send` over regions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.transforms import lion
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.decoupled import average_duplicates
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.numerics import check_unit_interval
from cocodc_jax.transforms.sparsify import SparseCompressor

PyTree = Any


@dataclasses.dataclass(frozen=True)
class StepExchange:
    """One way to exchange something at every step.

    Attributes:
      name: for records and error messages.
      init: `init(params, compressor) -> state` of one region.
      send: `send(gradient, state, compressor, key) -> (message, state)`.
      receive: `receive(messages, compressor) -> gradient`, every leaf of `messages`
        with the regions in front, `[M, ...]`. None: the message is a tree like the
        gradient, and its mean is wanted, which needs no gathering.
    """

    name: str
    init: Callable[..., PyTree]
    send: Callable[..., tuple[PyTree, PyTree]]
    receive: Callable[..., PyTree] | None = None


def mean_gradients() -> StepExchange:
    """The mean of the gradients: data parallelism, as it is."""
    return StepExchange(
        "mean_gradients",
        lambda params, compressor: (),
        lambda gradient, state, compressor, key: (gradient, state),
    )


def compressed_gradients() -> StepExchange:
    """The mean of the compressed gradients, decoded by everyone."""

    def init(params, compressor):
        return compressor.init(params)

    def send(gradient, state, compressor, key):
        return compressor.encode(gradient, state, key)

    return StepExchange("compressed_gradients", init, send, mean_of_decoded)


def decoupled_momentum(decay: float) -> StepExchange:
    """DeMo: d <- beta d + g; q = C(d); d <- d - q; the sign of the mean of all q.

    Of a cosine coefficient that several regions sent, the mean is over those (see
    `transforms.decoupled`). The learning rate is left out of d, as a sign has no size:
    it would matter only while the learning rate changes. Compressors that do not tell
    which values they carry are averaged as they are.

    Source: DeMo, arXiv 2411.19870; algorithms.md section 9.

    Args:
      decay: beta, in [0, 1).
    """
    check_unit_interval("momentum_decay", decay)

    def init(params, compressor):
        return error_feedback(compressor, decay).init(params)

    def send(gradient, state, compressor, key):
        return error_feedback(compressor, decay).encode(gradient, state, key)

    def receive(messages, compressor):
        has_places = isinstance(compressor, SparseCompressor)
        combine = average_duplicates if has_places else mean_of_decoded
        return jax.tree.map(jnp.sign, combine(messages, compressor))

    return StepExchange("decoupled_momentum", init, send, receive)


def signs(b1: float, b2: float, vote: str) -> StepExchange:
    """Distributed Lion: the signs of all regions' updates, averaged or put to a vote.

    Source: arXiv 2404.00438; algorithms.md section 10; see `transforms.lion`.

    Args:
      b1: weight of the momentum in what is sent.
      b2: decay of the momentum.
      vote: "average" or "majority".

    Raises:
      ValueError: for another `vote`, or a number out of range.
    """
    check_unit_interval("lion_beta1", b1)
    check_unit_interval("lion_beta2", b2)
    if vote not in lion.RULES:
        raise ValueError(f"lion_vote={vote!r} is unknown; use one of {lion.RULES}")
    return StepExchange(
        "signs",
        lambda params, compressor: lion.init(params),
        lambda gradient, state, compressor, key: lion.send(gradient, state, b1, b2),
        lambda messages, compressor: lion.combine(messages, vote),
    )


def mean_of_decoded(messages: PyTree, compressor: Compressor) -> PyTree:
    """The mean over the leading axis of what `[M, ...]` messages decode to.

    Summed in at least float32, one message at a time: M decoded trees would take M
    times the memory.
    """
    num_messages = jax.tree.leaves(messages)[0].shape[0]
    weights = jnp.full(num_messages, 1 / num_messages)
    return weighted_sum_of_decoded(messages, weights, compressor)


def weighted_sum_of_decoded(
    messages: PyTree, weights: jax.Array, compressor: Compressor
) -> PyTree:
    """As `mean_of_decoded` with weights `[M]`."""

    def decoded(i):
        message = compressor.decode(jax.tree.map(lambda x: x[i], messages))
        return jax.tree.map(
            lambda x: weights[i] * x.astype(jnp.promote_types(x.dtype, jnp.float32)),
            message,
        )

    total = jax.lax.fori_loop(
        1,
        weights.shape[0],
        lambda i, total: jax.tree.map(jnp.add, total, decoded(i)),
        decoded(0),
    )
    dtypes = jax.eval_shape(compressor.decode, jax.tree.map(lambda x: x[0], messages))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), total, dtypes)
