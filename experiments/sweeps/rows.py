"""The file of rows: one JSON object a line, appended completely or not at all.

The key of a run is made of the settings that differ from their defaults. Settings at
their default are left out, so a field that is added later, with a default that changes
nothing, leaves all keys as they are. A row in a file is identified by the full
configuration that is written in it, never by a written key: if the default of a field
has changed since, it is another run.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import cocodc_jax as cc
from cocodc_jax.files import open_regular, read_lines, writing
from cocodc_jax.run.config import train_config as run_config

FILE = "rows.jsonl"
# Settings that decide which text is read.
_OF_TEXT = ("dataset", "text_field", "tokenizer", "undecodable", "validation_fraction")
Row = dict[str, Any]
Config = Mapping[str, Any]  # As `TrainConfig.to_json` has it.


def append(folder: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Append a row; several processes may do so at once.

    An incomplete last line, of a process that was killed, is dropped first.
    """
    line = json.dumps(row).encode() + b"\n"
    path = folder / FILE
    with writing(path), open_regular(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read(folder: pathlib.Path) -> list[Row]:
    """Return the rows of a folder; of several rows of one run, the newest.

    Files of other machines, copied there as rows-NAME.jsonl, count too. A last line
    that is still being written, or was cut off by a kill, is left out. Keys are made
    from the configuration in the row, with today's defaults for fields that it lacks.
    """
    newest: dict[str, Row] = {}
    for path in sorted(folder.glob("rows*.jsonl")):
        rows = read_lines(path, _known, "row of a sweep")
        newest |= {row["row"]: row for row in rows}
    return list(newest.values())


def check_texts(rows: Sequence[Row]) -> None:
    """Refuse rows of one data set whose text differs: their losses cannot be compared.

    The same flags may read other files on another machine, or later. Rows of earlier
    versions have no digest of their text.
    """
    first: dict[str, Row] = {}
    for row in rows:
        if "text" not in row:
            continue
        of_data = {name: row["config"]["data"].get(name) for name in _OF_TEXT}

        other = first.setdefault(json.dumps(of_data), row)
        if other["text"] != row["text"]:
            raise ValueError(
                f"dataset={of_data['dataset']!r} of row {row['row']} is another text "
                f"({row['text']}) than that of row {other['row']} ({other['text']}): "
                "their losses do not compare; keep the rows of one text in a folder"
            )


def _known(row: Row) -> Row:
    """Return a row with today's keys."""
    config = completed(row["config"])
    keys = {"row": run_key(config), "setting": setting_key(config)}
    return {**row, **keys, "config": config}


def run_key(config: Config) -> str:
    """Return a short name of a resolved configuration, the same on every machine."""
    others = {}
    missing = object()
    for section in run_config.SECTIONS:
        values = config[section]
        usual = _defaults(section, config[section])
        others[section] = {
            n: v for n, v in values.items() if v != usual.get(n, missing)
        }

    text = json.dumps({**config, **others}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def setting_key(config: Config) -> str:
    """Return a key that the runs of a setting share, whatever their seeds."""
    same = dict(config)
    for section in ("run", "data"):
        same[section] = {n: v for n, v in config[section].items() if n != "seed"}
    return run_key(same)


def completed(config: Config) -> dict[str, Any]:
    """Return a written configuration, completed by fields that are newer than it.

    Fields that this version does not know stay: such a run equals none of today's.
    Arguments that the method was not given are None, because their defaults may change.
    """
    return dict(config) | {
        section: _defaults(section, config[section]) | dict(config[section])
        for section in run_config.SECTIONS
    }


def _defaults(section: str, values: Config) -> dict[str, Any]:
    """Return the defaults of a section, as JSON has them."""
    if section == "method":
        method = values["method"]
        return cc.methods.defaults(method) if method in cc.methods.METHODS else {}
    return {
        field.name: field.default
        for field in dataclasses.fields(run_config.SECTIONS[section])
        if field.default is not dataclasses.MISSING
    }
