"""What a run compiles, by name, to be compiled without being run."""

from __future__ import annotations

from typing import Any, NamedTuple


class Listed(NamedTuple):
    """One compiled program of a run.

    Attributes:
      name: what it does, with the fragment's number where it is one fragment's.
      program: what `jax.jit` made.
      arguments: of shapes, dtypes and shardings: `program.lower(*arguments)`.
      sent_bytes: what one region sends in it, as the run counts.
    """

    name: str
    program: Any
    arguments: tuple
    sent_bytes: int = 0
