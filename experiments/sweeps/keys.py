"""What a run of a sweep is known by: the settings in which it differs from defaults.

A setting at its default is left out of a key, so that a field which a configuration is
given later, with the default that does what was done before, leaves all keys as they
are. What is written of a run is known by the whole configuration that is written with
it, never by a key: a field whose default has changed since makes another run of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import cocodc_jax as cc
from cocodc_jax.run import config as run_config

Config = Mapping[str, Any]  # As `TrainConfig.to_json` has it.


def run_key(config: Config) -> str:
    """Return a short name of a resolved configuration, the same on every machine."""
    others = {section: _others(section, config[section]) for section in _sections()}
    text = json.dumps({**config, **others}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def setting_key(config: Config) -> str:
    """Return what the runs of a setting have in common, whatever their seeds."""
    same = dict(config)
    for section in ("run", "data"):
        same[section] = {n: v for n, v in config[section].items() if n != "seed"}
    return run_key(same)


def completed(config: Config) -> dict[str, Any]:
    """Return a written configuration with the fields that were not there yet.

    What this version does not know stays as it is: such a run is no run of today's.
    Arguments that a method was not given are there too, as None: they may have another
    default one day.
    """
    return dict(config) | {
        section: _defaults(section, config[section]) | dict(config[section])
        for section in _sections()
    }


def _sections() -> tuple[str, ...]:
    return tuple(run_config.SECTIONS)


def _others(section: str, values: Config) -> dict[str, Any]:
    """Return the values that are not at their defaults."""
    defaults = _defaults(section, values)
    missing = object()
    return {n: v for n, v in values.items() if v != defaults.get(n, missing)}


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
