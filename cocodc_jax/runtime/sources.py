"""What the runtime can give a merge, beyond the fragments themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.runtime.inner import LossFn
from cocodc_jax.sync.methods import Method

PyTree = Any

# These a merge is always given; the others come from a `Sources`.
_ALWAYS = frozenset(
    {
        "delay_steps",
        "stale_params",
        "gradient_fn",
        "key",
        "later_params",
        "later_gradient",
    }
)
_OF_A_BATCH = frozenset({"gradient_fn", "model_fn", "output_loss_fn"})


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the extra arguments of a merge come from; see `RegionProgram`.

    Attributes:
      loss_fn: `(params, batch, key) -> (loss, aux)`, for "gradient_fn".
      learning_rate: for "learning_rate", a constant or a schedule of the step.
      second_moment: regional optimizer state to moments, for "second_moment".
      outputs: `model(params, batch) -> outputs` and `loss(outputs, batch) -> scalar`,
        for "model_fn" and "output_loss_fn".
    """

    loss_fn: LossFn
    learning_rate: float | Callable[[int], Any] | None = None
    second_moment: Callable[[PyTree], PyTree] | None = None
    outputs: tuple[Callable, Callable] | None = None

    def check(self, method: Method) -> None:
        """Refuses a method whose merge needs what is not here.

        Raises:
          ValueError: naming the method and the argument that is missing.
        """
        needs, name = method.merge.needs, method.name
        wanted = (
            ("learning_rate", "learning_rate", "learning_rate, the inner optimizer's"),
            ("second_moment", "second_moment",
             "second_moment=adam_second_moment(b2) with the optimizer's b2"),
            ("model_fn", "outputs", "outputs=(model, loss), see RegionProgram"),
        )  # fmt: skip
        for need, source, advice in wanted:
            if need in needs and getattr(self, source) is None:
                raise ValueError(f"method={name!r} needs {need!r}: pass {advice}")
        known = _ALWAYS | {"learning_rate", "second_moment", *_OF_A_BATCH}
        if needs - known:
            raise ValueError(
                f"method={name!r} needs {sorted(needs - known)}, which the region "
                f"program cannot give; it gives {sorted(known)}"
            )

    def rate(self, step: int) -> jax.Array:
        """The learning rate of the inner step that led to `step`."""
        rate = self.learning_rate
        value = rate(max(step - 1, 0)) if callable(rate) else rate
        return jnp.asarray(value, float)

    def of_batch(self, needs: frozenset[str], whole: Callable, batch, key) -> dict:
        """The functions of one region's fragment that close over a batch.

        Args:
          needs: of the merge.
          whole: puts a fragment into the region's parameters.
          batch: one region's.
          key: for the loss.
        """
        extra: dict[str, Callable] = {}
        if "gradient_fn" in needs:
            extra["gradient_fn"] = jax.grad(
                lambda part: self.loss_fn(whole(part), batch, key)[0]
            )
        if "model_fn" in needs:
            assert self.outputs is not None
            model, loss = self.outputs
            extra["model_fn"] = lambda part: model(whole(part), batch)
            extra["output_loss_fn"] = lambda outputs: loss(outputs, batch)
        return extra


def needs_batch(needs: frozenset[str]) -> bool:
    """Whether a merge wants the last batch."""
    return bool(needs & _OF_A_BATCH)
