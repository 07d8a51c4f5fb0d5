"""What an extra of the installation brings, and one line where it is missing.

The core needs JAX and Optax alone. What needs more imports it so:

    with extra("train"):
        import orbax.checkpoint as ocp
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class MissingExtraError(ModuleNotFoundError):
    """A package is not installed that comes with an extra."""


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Import what comes with an extra, or say which one that is.

    Args:
      name: of the extra, as in `pyproject.toml`.

    Raises:
      MissingExtraError: if a package is not installed, with the command that brings it.
    """
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
