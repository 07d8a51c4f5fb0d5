"""Presets: named values of `TrainConfig`, each file a lab note."""

from experiments.configs.one_b import ONE_B
from experiments.configs.paper_150m import PAPER_150M
from experiments.configs.small import SMALL
from experiments.configs.smoke import SMOKE
from experiments.configs.tiny import TINY

PRESETS = {config.preset: config for config in (SMOKE, TINY, SMALL, PAPER_150M, ONE_B)}
