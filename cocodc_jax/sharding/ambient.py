"""Context meshes: hide the caller's from our code, and ours from the user's model."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh

Class = TypeVar("Class", bound=type)


def no_ambient_mesh() -> contextlib.AbstractContextManager:
    """Return a context without the mesh that a caller set (`jax.set_mesh`)."""
    try:
        return jax.set_mesh(None)  # pyright: ignore[reportArgumentType]
    except ValueError:  # Inside a trace, whose mesh must stay.
        return contextlib.nullcontext()


def in_own_context(function: Callable) -> Callable:
    """Decorate a function (not a generator) to run as if no mesh were set."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with no_ambient_mesh():
            return function(*args, **kwargs)

    return call


def methods_in_own_context(cls: Class) -> Class:
    """Decorate a class to run `__init__` and public methods `in_own_context`."""
    for name, value in list(vars(cls).items()):
        is_public = not name.startswith("_") or name == "__init__"
        if is_public and inspect.isfunction(value):
            setattr(cls, name, in_own_context(value))
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
