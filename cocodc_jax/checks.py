"""Checks of a configuration's fields, whose errors name the field and its value."""

from typing import Any


def check_least(config: Any, least: float, *names: str) -> None:
    """Refuse fields of a configuration that are below a number."""
    for name in names:
        value = getattr(config, name)
        if not value >= least:
            raise ValueError(f"{name}={value} must be at least {least}")


def check_choices(config: Any, **choices: tuple[str, ...]) -> None:
    """Refuse fields of a configuration that are not one of their choices."""
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; use one of {known}")
