"""Packages that come with an extra, and the error if one is missing.

Modules that take long to import, and that not every command needs, are imported on use:

    if TYPE_CHECKING:
        import orbax.checkpoint as ocp
    else:
        ocp = later("orbax.checkpoint", "train")
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any


class MissingExtraError(ModuleNotFoundError):
    """A package that comes with an extra is not installed."""


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Context for imports of an extra; a `MissingExtraError` says how to install it."""
    try:
        yield
    except MissingExtraError:  # It knows better which one.
        raise
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "cocodc_jax":
            raise  # No extra would bring that.
        raise MissingExtraError(
            f"{error.name} is not installed: pip install 'cocodc_jax[{name}]'",
            name=error.name,
        ) from None


def check_installed(package: str, name: str, flag: str) -> None:
    """Refuse a flag, given as NAME=VALUE, if a package of an extra is not installed."""
    spec = importlib.util.find_spec(package)
    # A folder of that name has a spec too (W&B makes such), without an origin.
    if spec is None or spec.origin is None:
        raise ValueError(
            f"{flag} needs a package that is not installed: pip install "
            f"'cocodc_jax[{name}]'"
        )


def later(module: str, extra_name: str) -> Any:
    """Return a stand-in for a module of an extra, which is imported on use."""

    class Later:
        def __getattr__(self, name: str) -> Any:
            with extra(extra_name):
                return getattr(importlib.import_module(module), name)

    return Later()
