"""Records, progress, plots and the report of runs.

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.report.comparison import (
        Run,
        compare,
        eval_curve,
        load_run,
        steps_to_loss,
    )
    from cocodc_jax.report.page import render
    from cocodc_jax.report.plots import (
        fragments_in_flight,
        loss_by_bytes,
        loss_by_steps,
        save_png,
    )
    from cocodc_jax.report.progress import RunProgress
    from cocodc_jax.report.records import MetricsWriter, read_records

__all__ = [
    "MetricsWriter",
    "Run",
    "RunProgress",
    "compare",
    "eval_curve",
    "fragments_in_flight",
    "load_run",
    "loss_by_bytes",
    "loss_by_steps",
    "read_records",
    "render",
    "save_png",
    "steps_to_loss",
]

__getattr__, __dir__ = attach(__name__)
