"""Leaves of the configuration in `--help`: their order, values and choices."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import get_args

import cocodc_jax as cc
from cocodc_jax.data.config import Partition, Undecodable
from cocodc_jax.engine.collectives import ALL_REDUCES
from cocodc_jax.engine.placement import MEMORIES
from cocodc_jax.engine.region_map import HOW_MAPPED
from cocodc_jax.engine.transport import EXCHANGES, OVERLAPS
from cocodc_jax.methods import METHODS
from cocodc_jax.methods.decoupled_diloco import AVERAGES
from cocodc_jax.methods.lt_admm import GRAPHS
from cocodc_jax.models.config import (
    ATTENTIONS,
    BACKWARDS,
    COMPUTE_DTYPES,
    DISPATCHES,
    REMAT_POLICIES,
)
from cocodc_jax.run.config import LEAVES, SECTIONS, TrainConfig
from cocodc_jax.run.messages import Option, Sections
from cocodc_jax.run.optimizer_config import OPTIMIZERS
from cocodc_jax.sync.cutting import STRATEGIES
from cocodc_jax.sync.messages import MEANS
from cocodc_jax.sync.method import WEIGHTS
from cocodc_jax.sync.outer import PLACEMENTS
from cocodc_jax.sync.schedules.adaptive import SCORES
from cocodc_jax.transforms.curvature import NAMES
from cocodc_jax.transforms.lion import RULES
from cocodc_jax.transforms.outer import GAPS

# Possible values of each leaf, if there are few.
CHOICES: dict[str, Collection[str]] = {
    "all_reduce": ALL_REDUCES, "attention": ATTENTIONS, "averaging": AVERAGES,
    "backward": BACKWARDS, "compute_dtype": COMPUTE_DTYPES, "exchange": EXCHANGES,
    "curvature": (*NAMES, "secant"), "expert_dispatch": DISPATCHES, "graph": GRAPHS,
    "expert_weights": WEIGHTS, "fragment_strategy": STRATEGIES, "overlap": OVERLAPS,
    "inner_optimizer": OPTIMIZERS, "lion_vote": RULES, "local_regions": HOW_MAPPED,
    "method": METHODS, "optimizer_memory": MEMORIES, "outer_placement": PLACEMENTS,
    "partition": get_args(Partition), "region_weights": WEIGHTS,
    "remat": REMAT_POLICIES, "sparse_mean": MEANS, "staleness_gap": GAPS,
    "transmission_score": SCORES, "undecodable": get_args(Undecodable),
}  # fmt: skip

# Flags that most runs set, which `--help` explains first.
MAIN = (
    "method", "regions", "steps", "sync_interval", "num_fragments", "delay_steps",
    "outer_lr", "compress", "inner_optimizer", "inner_lr", "dataset", "tokenizer",
    "sequence_length", "batch_per_region", "devices", "seed", "init_from", "eval_every",
    "checkpoint_every",
)  # fmt: skip
# A program's own that few runs need.
RARE = (
    "plan_frontier", "plan_step_s", "plan_links", "plan_gbps", "plan_latency_ms",
    "wandb_mode", "metrics_port", "on_event", "json",
)  # fmt: skip
# Set to test or measure this package, and listed last.
DEVELOPER = (
    "step_seconds", "outer_digests", "local_regions", "overlap", "all_reduce",
    "outer_channels", "backward", "loss_chunk_tokens", "curvature_units",
)  # fmt: skip


def by_use(sections: Sections, in_full: tuple[str, ...]) -> Sections:
    """Return sections with main flags first and a developer's last."""
    (title, own), *rest = ((title, list(x)) for title, x in sections.items())
    found = {x.name: x for _, xs in rest for x in xs if isinstance(x, Option)}
    shown = {title: [x for x in own if not _is_any(x, RARE)]}
    shown[title] += [found[name] for name in MAIN if name in found]
    rest = [(t, [x for x in xs if not _is_any(x, MAIN + DEVELOPER)]) for t, xs in rest]
    rest.insert(0, ("Plans and tracking", [x for x in own if _is_any(x, RARE)]))
    last: list[Option | str] = [found[name] for name in DEVELOPER if name in found]
    rest.append(("For developers of this package", last))
    named: list[Option | str] = []
    for title, entries in rest:
        names = ", ".join(x.name for x in entries if isinstance(x, Option))
        if entries and title.startswith(in_full):
            shown[title] = entries
        elif names:
            named.append(f"{title.partition(':')[0]}: {names}.")
    if named:
        shown["Further flags, which --help=all explains"] = named
    return shown


def _is_any(entry: Option | str, names: Collection[str]) -> bool:
    return isinstance(entry, Option) and entry.name in names


def run_sections(
    config: TrainConfig, names: Collection[str], methods: Iterable[str]
) -> Sections:
    """Return the leaves of a run's configuration by section."""
    taken = {name for method in methods for name in cc.methods.defaults(method)}
    found: dict[str, list[Option | str]] = {}
    for section, cls in SECTIONS.items():
        leaves = [n for n in names if LEAVES[n].section == section]
        others: list[str] = []
        values = dataclasses.asdict(getattr(config, section))
        if section == "method":
            one = list(methods) == [config.method.method]
            arguments = config.method.values if one else config.method.where_taken
            values = {"method": config.method.method} | dict(arguments)
            others = [n for n in leaves if n != "method" and n not in taken]
            leaves = [n for n in leaves if n not in others]
        entries: list[Option | str] = [
            Option(n, values.get(n), LEAVES[n].help, CHOICES.get(n, ())) for n in leaves
        ]
        if others:
            entries.append(
                "Arguments of other methods, which --method=NAME --help explains: "
                f"{', '.join(others)}."
            )
        summary = (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
        title = f"{section.capitalize()}: {summary[:1].lower()}{summary[1:]}"
        found[title] = entries
    return found
