"""Context meshes: hide the caller's from our code, and ours from the user's model."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh

Class = TypeVar("Class", bound=type)


@contextlib.contextmanager
def in_own_context() -> Iterator[None]:
    """Run as if no mesh were set; a context, or a decorator of a function."""
    hidden: contextlib.AbstractContextManager = contextlib.nullcontext()
    with contextlib.suppress(ValueError):  # Inside a trace, whose mesh must stay.
        hidden = jax.set_mesh(None)  # pyright: ignore[reportArgumentType]
    with hidden:
        yield


def methods_in_own_context(cls: Class) -> Class:
    """Decorate a class to run `__init__` and public methods `in_own_context`."""
    for name, value in list(vars(cls).items()):
        is_public = not name.startswith("_") or name == "__init__"
        if is_public and inspect.isfunction(value):
            setattr(cls, name, in_own_context()(value))
    return cls


def trace_without_mesh_if_needed(function: Callable) -> Callable:
    """Decorate a user's function to be traced without our mesh if it fails under it.

    Flax Linen constrains boxed parameters when a mesh is in context, also by axes that
    this mesh lacks, and in shapes that `nn.DenseGeneral` makes only later. A function
    that can be traced under the mesh is, so that it can name the axes inside a region.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            try:
                with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                    return function(*args, **kwargs)
            except Exception:
                raise error from None

    return call
