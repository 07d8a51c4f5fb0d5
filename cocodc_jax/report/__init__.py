"""Records, progress, plots and the report of runs.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.report.comparison import Run as Run
    from cocodc_jax.report.comparison import compare as compare
    from cocodc_jax.report.comparison import eval_curve as eval_curve
    from cocodc_jax.report.comparison import load_run as load_run
    from cocodc_jax.report.comparison import steps_to_loss as steps_to_loss
    from cocodc_jax.report.page import render as render
    from cocodc_jax.report.plots import fragments_in_flight as fragments_in_flight
    from cocodc_jax.report.plots import loss_by_bytes as loss_by_bytes
    from cocodc_jax.report.plots import loss_by_steps as loss_by_steps
    from cocodc_jax.report.plots import save_png as save_png
    from cocodc_jax.report.progress import RunProgress as RunProgress
    from cocodc_jax.report.records import MetricsWriter as MetricsWriter
    from cocodc_jax.report.records import read_records as read_records

__getattr__, __dir__ = attach(__name__)
