"""Shows the state of runs in a terminal, from their files or from their metrics.

    python -m experiments.status WORKDIR
    python -m experiments.status HOST:PORT HOST:PORT

WORKDIR is the folder of a run, or one with a folder for each region or run, as elastic
regions, compare and sweeps write it. A row is a process; the lock on its folder shows
whether it still runs. HOST:PORT is the address of a process that was started with
`--metrics_port=PORT`. Columns without any value are left out.
"""

import datetime
import functools
import http.client
import pathlib
import re
import shutil
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cocodc_jax.files import read_lines, read_table
from cocodc_jax.report.records import METRICS_FILE, TIMING_FILE, Record, read_records
from cocodc_jax.report.units import format_bytes, format_count, format_duration
from cocodc_jax.run.bucket import folder_here
from cocodc_jax.run.fault_watch import FAULTS_FILE
from cocodc_jax.run.resume import CHECKPOINTS, CONFIG_FILE, is_starting, owner_of
from cocodc_jax.run.session import SUMMARY_FILE
from cocodc_jax.run.taking_part import SYNCS_FILE
from cocodc_jax.train.checkpoint import steps_in

from . import program

_RECENT = 50  # Lines of timing.jsonl from which the time left is estimated.
_ANSWER_S = 10.0

Row = dict[str, str]
Found = tuple[list[Row], list[str]]
# Formats of columns that are not text.
SHOW: Mapping[str, Callable[[Any], str]] = {
    "left": format_duration,
    "loss": "{:.3f}".format,
    "eval": "{:.4f}".format,
    "tokens/s": format_count,
    "MFU": "{:.1%}".format,
    "stall": "{:.1f} s".format,
    "sent": format_bytes,
    "goodput": "{:.1%}".format,
    **dict.fromkeys(("syncs", "missed", "faults"), "{:.0f}".format),
    "members": lambda value: value if isinstance(value, str) else f"{value:.0f}",
}


def runs_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return a folder if it is that of a run, else the runs' folders in it."""
    runs = [folder]
    if not (folder / CONFIG_FILE).exists():
        configs = [
            *folder.glob(f"*/{CONFIG_FILE}"),
            *folder.glob(f"*/*/{CONFIG_FILE}"),
        ]
        runs = _sorted(path.parent for path in configs)
    if not runs:
        raise ValueError(f"{str(folder)!r} holds no run; name the folder of one")
    return runs


def of_run(run: pathlib.Path, folder: pathlib.Path, now: float) -> Found:
    """Return the rows of a run in a folder, and lines about faults."""
    rows = []
    lines = []
    config = _config(run)
    processes = _sorted(path for path in run.glob("process_*") if path.is_dir())
    for process in (run, *processes):
        name = process.name if run == folder else str(process.relative_to(folder))
        faults = _faults(process)
        lines += [f"{name}: {line}" for line in faults]
        rows.append({"run": name} | _row(process, run, config, len(faults), now))

    return rows, lines


def _sorted(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Sort by parent, then with region_2 before region_10."""
    return sorted(paths, key=lambda path: (path.parent, len(path.name), path.name))


def _config(run: pathlib.Path) -> dict[str, Any]:
    config = read_table(run / CONFIG_FILE)
    try:
        return {
            "steps": int(config["run"]["steps"]),
            "regions": int(config["run"]["regions"]),
            "method": str(config["method"]["method"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run / CONFIG_FILE} is damaged: it names no run") from error


def _row(
    process: pathlib.Path,
    run: pathlib.Path,
    config: Mapping[str, Any],
    num_faults: int,
    now: float,
) -> Row:
    """Return the columns of a process, from its folder."""
    records = _records(process / METRICS_FILE)
    timing = _records(process / TIMING_FILE)
    last = {record["kind"]: record for record in records}
    sent = [r["bytes_sent_per_region"] for r in records if "bytes_sent_per_region" in r]
    syncs = read_lines(process / SYNCS_FILE, dict, skips_damaged=True)
    now_row = timing[-1] if timing else {}
    step = max((line["step"] for line in (*records[-1:], *timing[-1:])), default=0)

    state = "stopped" if records or timing else "not begun"
    if is_starting(process):
        state = "restarting" if records or timing else "starting"
    elif owner_of(process):
        state = "running"
    elif (summary := process / SUMMARY_FILE).exists():
        result = read_table(summary)
        if result.get("steps") == config["steps"]:
            state = "finished"
            if "alone_since_step" in result:
                state += f" alone since step {result['alone_since_step']}"
            if "result_of_region" in result:
                state += f", result of region {result['result_of_region']}"

    is_training = state not in ("starting", "restarting")
    region = re.fullmatch(r"region_(\d+)", run.name)
    mean = [sync["regions"] for sync in syncs if sync.get("regions") is not None]
    missed = None
    if region:
        missed = sum(int(region[1]) not in regions for regions in mean)

    saved = steps_in(run / CHECKPOINTS)
    checkpoint = ""
    if saved:
        path = run / CHECKPOINTS / str(saved[-1])
        checkpoint = f"{saved[-1]}, {_ago(path.stat().st_mtime, now)}"

    paths = (process / METRICS_FILE, process / TIMING_FILE)
    newest = max((p.stat().st_mtime for p in paths if p.exists()), default=None)
    left = _seconds_left(timing, config["steps"] - step) if state == "running" else None
    return _shown(
        {
            "method": config["method"],
            "state": state,
            "step": f"{step} of {config['steps']}",
            "left": left,
            "loss": last.get("train", {}).get("loss"),
            "eval": last.get("eval", {}).get("eval_loss"),
            "tokens/s": now_row.get("tokens_per_second") if is_training else None,
            "MFU": now_row.get("mfu") if is_training else None,
            "stall": sum(x["stall_s"] for x in timing) if timing else None,
            "sent": sent[-1] if sent else None,
            "syncs": sum(r["kind"] == "sync" for r in records) or None,
            "missed": missed if mean else None,
            "members": _members(run, int(region[1]), config) if region else "",
            "faults": num_faults if syncs or num_faults else None,
            "checkpoint": checkpoint,
            "updated": _ago(newest, now),
        }
    )


def _records(path: pathlib.Path) -> list[Record]:
    """Return the records of a file; none if it is missing."""
    return read_records(path) if path.exists() else []


def _members(run: pathlib.Path, region: int, config: Mapping[str, Any]) -> str:
    """Return the number of regions in the last mean that any region has merged.

    A region that is not running knows no means after its end.
    """
    last: dict[str, Any] | None = None
    for path in sorted(run.parent.glob(f"region_*/{SYNCS_FILE}")):
        try:
            lines = read_lines(path, dict, skips_damaged=True)
        except OSError:
            continue  # The region's own row says so.
        lines = [line for line in lines if line.get("regions") is not None]
        if lines and (last is None or _when(lines[-1]) > _when(last)):
            last = lines[-1]

    if last is None:
        return ""
    text = f"{len(last['regions'])} of {config['regions']}"
    return text if region in last["regions"] else f"{text}, without it"


def _when(line: Mapping[str, Any]) -> tuple[int, float]:
    """Order merges by their view of the members, then by time."""
    return line.get("epoch", 0), line.get("time", 0.0)


def _shown(values: Mapping[str, Any]) -> Row:
    """Return values as the text of their columns; None is empty."""
    return {
        name: "" if value is None else SHOW.get(name, str)(value)
        for name, value in values.items()
    }


def _seconds_left(timing: Sequence[Record], steps: int) -> float | None:
    """Estimate the seconds left from the last turns' median; None without two turns."""
    recent = timing[-_RECENT:]
    steps_s = [
        (b["wall_s"] - a["wall_s"]) / (b["step"] - a["step"])
        for a, b in zip(recent, recent[1:], strict=False)
        if b["step"] > a["step"] and b["wall_s"] > a["wall_s"]
    ]
    return statistics.median(steps_s) * steps if steps_s else None


def _faults(process: pathlib.Path) -> list[str]:
    """Return a line for each fault that has not ended."""
    named: dict[tuple, str] = {}
    for line in read_lines(process / FAULTS_FILE, dict, skips_damaged=True):
        key = (line["kind"], *line["where"])
        named.pop(key, None)
        if line["fault"] == "begins":
            where = ", ".join(map(str, line["where"]))
            named[key] = f"{line['kind']} {where}, since step {line['start_step']}"
    return list(named.values())


def of_address(address: str, now: float) -> Found:
    """Return the row of the process at HOST:PORT, and lines about faults."""
    url = f"http://{address}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise OSError(f"nothing answers at {url} ({reason})") from error

    samples = _samples(text)
    if "cocodc_step" not in samples:
        raise ValueError(f"what answers at {url} is no run of cocodc_jax")

    def get(name: str, label: str = "") -> float | None:
        return samples.get(f"cocodc_{name}", {}).get(label)

    def whole(name: str) -> str:
        value = get(name)
        return "" if value is None else f"{value:.0f}"

    saved = whole("checkpoint_step")
    when = get("checkpoint_timestamp_seconds")
    faults = samples.get("cocodc_fault", {})
    row = {
        "run": address,
        "state": "running",
        "step": f"{whole('step')} of {whole('planned_steps')}",
        "loss": get("loss"),
        "eval": get("eval_loss"),
        "tokens/s": get("tokens_per_second"),
        "MFU": get("mfu_ratio"),
        "stall": get("stall_seconds_total"),
        "sent": get("sent_bytes_total"),
        "syncs": get("syncs_total", "applied"),
        "missed": get("syncs_total", "missed"),
        "members": get("members"),
        "goodput": get("goodput_ratio"),
        "faults": len(faults),
        "checkpoint": f"{saved}, {_ago(when, now)}" if when else saved,
        "updated": _ago(get("progress_timestamp_seconds"), now),
    }

    return [_shown(row)], [f"{address}: {label}" for label in faults]


def _samples(text: str) -> dict[str, dict[str, float]]:
    """Return values by metric and by its labels without those of the process."""
    samples: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        sample = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        if not sample:
            continue
        metric, labels, value = sample.groups()
        further = [
            text
            for name, text in re.findall(r'(\w+)="([^"]*)"', labels or "")
            if name not in ("region", "process")
        ]
        samples.setdefault(metric, {})[" ".join(further)] = float(value)
    return samples


def _ago(when: float | None, now: float) -> str:
    return "" if when is None else f"{format_duration(max(now - when, 0.0))} ago"


def table(rows: Sequence[Row], width: int) -> str:
    """Return aligned columns, without those that are empty in all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if any(row.get(name) for row in rows)]
    lines = [names, *([row.get(name) or "-" for name in names] for row in rows)]
    wide = _aligned(lines)
    if max(map(len, wide.splitlines())) <= width:
        return wide
    tall = _aligned(list(zip(*lines, strict=True)))
    return min(wide, tall, key=lambda text: max(map(len, text.splitlines())))


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{x:<{n}}" for x, n in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    values = program.own_flags()
    now = time.time()
    rows: list[Row] = []
    lines: list[str] = []
    looks: list[tuple[str, str, Callable[[], Found]]] = []
    code = 0

    try:
        with program.usage_errors(values):
            targets = program.parse(values, argv, __doc__, {})
            if not targets:
                raise ValueError(
                    "name the folder of a run, or HOST:PORT of its metrics"
                )

            for target in targets:
                if re.fullmatch(r"[^/]+:\d+", target):
                    look = functools.partial(of_address, target, now)
                    looks.append((target, "no answer", look))
                    continue
                folder = folder_here(target)
                for run in runs_in(folder):
                    look = functools.partial(of_run, run, folder, now)
                    looks.append((run.name, "damaged", look))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    for name, state, look in looks:  # An unreadable one does not hide the others.
        try:
            new_rows, new_lines = look()
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            new_rows = [{"run": name, "method": "", "state": state}]
            new_lines = []
            code = 1
        rows += new_rows
        lines += new_lines

    print(f"{datetime.datetime.fromtimestamp(now):%Y-%m-%d %H:%M:%S}")
    print(table(rows, shutil.get_terminal_size().columns))
    for line in lines:
        print(f"fault: {line}")

    return code


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
