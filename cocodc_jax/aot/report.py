"""The summary and the table of a run's compiled programs."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table

from cocodc_jax.aot.programs import INNER_STEPS
from cocodc_jax.run.config.train_config import TrainConfig

Record = dict[str, Any]
# Tokens; with fewer, summing the head's gradient moves more than products compute.
_SMALL_CHUNK = 512
_HEADS = (
    "arguments",
    "temporaries",
    "peak",
    "GFLOP",
    "of asked",
    "inside",
    "between",
    "spans",
    "least",
    "limit",
    "compiled",
)


def summarise(about: Record, programs: list[Record]) -> Record:
    """Summarise a run's programs.

    Args:
      about: what holds for all programs, from `Job.run`.
      programs: a record of each, from `Job.run`.

    Returns:
      Measures by name, of all programs:

      - `fits`: whether each fits in memory.
      - `overlapped`: whether every message between regions crosses while the inner
        steps run; False if there are no messages.
      - `temp_bytes`, `peak_bytes`: of the program that needs most.
      - `hbm_bytes`: memory of a device.

      If the inner steps were compiled, also of one step:

      - `step_seconds`, `mfu`: the least time, and the utilization at it.
      - `step_seconds_with_syncs`, `mfu_with_syncs`: the same with a step's share of
        syncs.
      - `limit`: the longest term of the least time.
      - `recomputed_flops`: operations of a device that remat computes again.
      - `flops_ratio`: operations over the model's own. Below 1 if a kernel leaves out
        pairs of positions that the mask hides, which the model's count includes.
      - `excess_ratio`: operations over the model's own and those computed again.
      - `inside_ratio`: bytes inside a region over the least possible.
    """
    sending = [record for record in programs if record["sent_bytes"]]
    between = [row for record in sending for row in _rows(record, "between")]
    summary: Record = dict(
        fits=all(record["fits"] for record in programs),
        overlapped=bool(between) and all(row["spans"] for row in between),
        temp_bytes=max(record["temp_bytes"] for record in programs),
        peak_bytes=max(record.get("peak_bytes", 0) for record in programs),
        hbm_bytes=about["hbm_bytes"],
    )

    steps = next((r for r in programs if r["name"] == INNER_STEPS), {})
    if "estimate" not in steps:
        return summary | dict(mfu=None)

    num_steps = about["scan_steps"]
    step_s = steps["estimate"]["seconds"] / num_steps
    sync_s = about["syncs_per_step"] * _mean_sync_s(about, programs, step_s)
    least = about["least_bytes_inside"]
    ideal_s = about["model_flops"] / about["peak_flops"]

    return summary | dict(
        step_seconds=step_s,
        mfu=ideal_s / step_s,
        step_seconds_with_syncs=step_s + sync_s,
        mfu_with_syncs=ideal_s / (step_s + sync_s),
        limit=steps["estimate"]["limit"],
        recomputed_flops=about["recomputed_flops"],
        flops_ratio=steps["flops"] / num_steps / about["model_flops"],
        excess_ratio=excess_ratio(about, steps),
        inside_ratio=inside_bytes(steps) / num_steps / least if least else None,
    )


def _rows(record: Record, where: str) -> list[Record]:
    """Return a program's collectives inside regions, or between them."""
    return [row for row in record.get("collectives", ()) if row["where"] == where]


def _mean_sync_s(about: Record, programs: list[Record], step_s: float) -> float:
    """Return the mean seconds of one fragment's programs, without their inner steps."""
    total = 0.0
    for record in programs:
        is_sync = "fragment" in record["name"] or "outer step" in record["name"]
        if is_sync and "estimate" in record:
            of_steps = (record.get("calls_steps") or 0) * step_s
            total += max(record["estimate"]["seconds"] - of_steps, 0.0)
    return total / about["num_fragments"]


def excess_ratio(about: Record, record: Record) -> float | None:
    """Return a program's operations over the model's own and those computed again.

    None if it has no inner steps.
    """
    is_steps = record["name"] == INNER_STEPS
    num_steps = about["scan_steps"] if is_steps else record.get("calls_steps")
    if not num_steps:
        return None
    asked = about["model_flops"] + about["recomputed_flops"]
    return record["flops"] / num_steps / asked


def inside_bytes(record: Record) -> float:
    """Return the bytes that a device receives inside its region in one call."""
    return sum(row["num_bytes"] for row in _rows(record, "inside"))


def table(about: Record, programs: list[Record]) -> Table:
    """Return a table with a row for each program; numbers are of one device."""
    layout = Table(box=box.SIMPLE, pad_edge=False)
    layout.add_column("program", no_wrap=True)
    for head in _HEADS:
        layout.add_column(head, justify="right", no_wrap=True)

    for record in programs:
        if "refused" in record:
            layout.add_row(record["name"], "", f"[red]{size(record['temp_bytes'])}")
            continue

        rows = _rows(record, "between")
        estimate = record["estimate"]
        ratio = excess_ratio(about, record)
        layout.add_row(
            record["name"],
            size(record["argument_bytes"]),
            size(record["temp_bytes"]),
            ("" if record["fits"] else "[red]") + size(record["peak_bytes"]),
            f"{record['flops'] / 1e9:,.1f}",
            "" if ratio is None else f"{ratio:.2f}",
            size(inside_bytes(record)),
            size(sum(row["num_bytes"] for row in rows)),
            ("yes" if all(row["spans"] for row in rows) else "no") if rows else "",
            f"{estimate['seconds'] * 1e3:,.2f} ms",
            estimate["limit"],
            f"{record['seconds']:.0f} s",
        )

    layout.caption = (
        f"Of one of {about['num_devices']} devices, each with "
        f"{size(about['hbm_bytes'])}; {INNER_STEPS}: {about['scan_steps']} in one "
        "call; asked: the model's own operations, and what is computed again"
    )

    return layout


def lines(
    config: TrainConfig, about: Record, programs: list[Record], summary: Record
) -> Iterator[str]:
    """Yield the remarks below the table."""
    for record in programs:
        if "refused" in record:
            yield f"{record['name']}: {record['refused']}"
        for option, value in record.get("options", {}).items():
            yield f"{record['name']}: the run compiles it with {option}={value}"

        of_steps = record if record["name"] == INNER_STEPS else {}
        if held := of_steps.get("host_bytes"):
            yield (
                f"{INNER_STEPS}: {size(held)} of the optimizer's state are in host "
                f"memory; a step loads and stores them, {size(2 * held)} in all, which "
                "the least time leaves out"
            )

        if kept := of_steps.get("host_temp_bytes"):
            yield (
                f"{INNER_STEPS}: {size(kept)} of temporaries are in host memory: "
                f"what remat={config.model.remat} keeps; a step stores and loads them, "
                "which the least time leaves out"
            )

        for row in record.get("collectives", ()):
            yield (
                f"{record['name']}: {row['count']} {row['kind']}"
                f"{' (asynchronous)' if row['is_async'] else ''} {row['where']} regions"
                f" over {', '.join(row['axes']) or 'nothing'}, run "
                f"{row['executions']} times, {size(row['num_bytes'])}, the largest "
                f"{row['largest']}{', spans the inner steps' if row['spans'] else ''}"
            )

        if record["sent_bytes"] and _rows(record, "between"):
            device_bytes = (
                record["sent_bytes"] * config.run.regions / about["num_devices"]
            )
            yield (
                f"{record['name']}: the run counts {size(record['sent_bytes'])} sent "
                f"by a region, {size(device_bytes)} a device if divided"
            )

    if summary["mfu"] is None:
        return

    ratio = summary["inside_ratio"]
    yield (
        f"Operations: {summary['flops_ratio']:.2f} times the model's own, "
        f"{summary['excess_ratio']:.2f} times these and the "
        f"{summary['recomputed_flops'] / 1e9:,.1f} GFLOP that "
        f"remat={config.model.remat} computes again"
        + (f"; bytes inside a region: {ratio:.2f} times FSDP's own" if ratio else "")
    )

    yield (
        f"A step takes at least {summary['step_seconds'] * 1e3:,.1f} ms, by "
        f"{summary['limit']}: MFU at most {summary['mfu']:.1%}; with its syncs "
        f"{summary['mfu_with_syncs']:.1%}"
    )


def size(num_bytes: float) -> str:
    """Write a number of bytes.

    >>> size(0), size(1500), size(36.6e9)
    ('0 B', '1.5 kB', '36.6 GB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def remedies(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Propose flags that need less memory, each with the configuration that has them.

    Flags that change no number come first. Each proposal includes those before it, but
    the parts of a batch and the model axes are alternatives.
    """
    run = config.run
    data = config.data
    changes: dict[str, Any] = {}

    def changed(**more: Any) -> tuple[str, TrainConfig]:
        all_changes = changes | more
        text = " ".join(f"--{name}={value}" for name, value in all_changes.items())
        return text, config.replace(**all_changes)

    if config.model.remat != "full":
        changes["remat"] = "full"
        yield changed()

    if config.model.loss_chunk_tokens > _SMALL_CHUNK:
        changes["loss_chunk_tokens"] = _SMALL_CHUNK
        yield changed()

    local_batch = data.batch_per_region // run.devices_per_batch
    parts = run.accumulate_steps
    while not run.is_pipelined and local_batch % (2 * parts) == 0:
        parts *= 2
        yield changed(accumulate_steps=parts)

    for axis in (2, 4, 8):
        model_axis = axis * run.model_axis
        if run.data_axis % axis == 0 and config.model.num_kv_heads % model_axis == 0:
            yield changed(data_axis=run.data_axis // axis, model_axis=model_axis)

    batch = data.batch_per_region
    while batch % (2 * run.devices_per_batch) == 0:
        batch //= 2
        yield changed(batch_per_region=batch)
