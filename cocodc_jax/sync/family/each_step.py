"""Methods whose regions exchange something at every inner step, and no parameters."""

import functools

import optax

from cocodc_jax.sync import every_step, merge
from cocodc_jax.sync.method import Method
from cocodc_jax.transforms import compression


def data_parallel() -> Method:
    """Gradients averaged over all regions at every step: the reference.

    M regions make one step on M times the batch; there is no outer optimizer.
    """
    return _each_step("data_parallel", step_exchange=every_step.mean_gradients())


def demo(momentum_decay: float = 0.999, compress: str = "dct:32") -> Method:
    """DeMo (arXiv 2411.19870): the top of the momentum's cosine transform, every step.

    Args:
      momentum_decay: beta, in [0, 1).
      compress: what is taken out of the momentum; without error feedback, which the
        method is.
    """
    return _each_step(
        "demo",
        step_exchange=every_step.decoupled_momentum(momentum_decay),
        compressor=compression.parse(compress),
        inner_optimizer="sgd",
    )


def distributed_lion(
    lion_beta1: float = 0.9, lion_beta2: float = 0.99, lion_vote: str = "majority"
) -> Method:
    """Distributed Lion (arXiv 2404.00438): one bit a parameter at every step.

    Args:
      lion_beta1: b1, weight of the momentum in what is sent.
      lion_beta2: b2, decay of the momentum.
      lion_vote: "majority" or "average" of the regions' signs.
    """
    return _each_step(
        "distributed_lion",
        step_exchange=every_step.signs(lion_beta1, lion_beta2, lion_vote),
        inner_optimizer="sgd",
        why_uncompressed="its messages are one bit a parameter",
    )


def dct_threshold(compress: str = "ef+threshold:0.01") -> Method:
    """Dynamic communication thresholding (arXiv 2010.08899): large gradients only.

    Gradients whose magnitude reaches a tensor's threshold are sent, the others kept
    for later; thresholds are taken anew every so many steps.

    Args:
      compress: the compressor with its error feedback.
    """
    return _each_step(
        "dct_threshold",
        step_exchange=every_step.compressed_gradients(),
        compressor=compression.parse(compress),
    )


_each_step = functools.partial(
    Method, schedule=None, merge=merge.replace(), outer_optimizer=optax.identity()
)
