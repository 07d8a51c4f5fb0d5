"""Whether and how a run is shown in Weights & Biases.

Not part of the configuration: it changes no number, and may change when a run resumes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from cocodc_jax._extras import check_installed
from cocodc_jax.report.events import OpenMirror, tensorboard, weights_and_biases

MODES = ("online", "offline", "disabled")


@dataclasses.dataclass(frozen=True)
class Tracking:
    """Where process 0 shows its records, besides TensorBoard.

    Attributes:
      wandb: project in Weights & Biases that shows the run. Default: none.
      wandb_mode: online, offline (`wandb sync` uploads it later) or disabled. Default:
        what WANDB_MODE in the environment says.
    """

    wandb: str = ""
    wandb_mode: str = ""

    def __post_init__(self):
        """Validate the words."""
        if self.wandb_mode not in ("", *MODES):
            raise ValueError(
                f"wandb_mode={self.wandb_mode!r} is unknown; use one of {MODES}"
            )
        if self.wandb_mode and not self.wandb:
            raise ValueError(
                f"wandb_mode={self.wandb_mode} has no project; add --wandb=PROJECT"
            )

    def check(self) -> None:
        """Refuse a project if process 0 lacks the package."""
        if self._is_here:
            check_installed("wandb", "wandb", f"wandb={self.wandb}")

    def mirrors(self, name: str, config: Mapping[str, Any]) -> Sequence[OpenMirror]:
        """Return where this process's records go."""
        if not self._is_here:
            return (tensorboard,)
        wandb = functools.partial(
            weights_and_biases,
            project=self.wandb,
            mode=self.wandb_mode or None,
            name=name,
            config=config,
        )
        return (tensorboard, wandb)

    @property
    def _is_here(self) -> bool:
        """Whether this process shows the run: only one does."""
        return bool(self.wandb) and jax.process_index() == 0


NO_TRACKING = Tracking()
