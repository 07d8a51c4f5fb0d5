"""Follows one message of Streaming DiLoCo through the files of this package.

    python docs/message_trace.py            # Prints what it saw.
    python docs/message_trace.py --write    # Writes it into docs/design/messages.md.

A run on one CPU device goes to its steady state; then the calls of the step at which a
fragment starts, and of the step at which it is merged, are recorded (`sys.setprofile`).
Everything else that happens at these steps, the inner steps and the losses, is the
caller's and not counted. Programs are compiled before.
"""

import ast
import dataclasses
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import cocodc_jax as cc

PACKAGE = pathlib.Path(cc.__file__).parent
PAGE = pathlib.Path(__file__).parent / "design" / "messages.md"
FIRST_LINE = "<!-- Written by docs/message_trace.py. -->"
LAST_LINE = "<!-- End of what it wrote. -->"


class Trace(NamedTuple):
    """The files of this package that were called, in the order of the calls."""

    files: tuple[str, ...]  # Once each, in the order of their first calls.
    num_moves: int  # From one file to another.


class Message(NamedTuple):
    """The traces of one message."""

    start: Trace
    finish: Trace


def traced(call: Callable[[], Any]) -> tuple[Trace, Any]:
    """Run `call`; return its trace and its result."""
    visited: list[str] = []

    def profile(frame: types.FrameType, event: str, argument: Any) -> None:
        del argument
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            name = path.relative_to(PACKAGE).as_posix()
            if not visited or visited[-1] != name:
                visited.append(name)

    sys.setprofile(profile)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return Trace(tuple(dict.fromkeys(visited)), len(visited)), result


def follow() -> Message:
    """Follow one message from its start to its merge."""
    params = {
        f"block_{i}": {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)} for i in range(2)
    }
    method = cc.methods.get(
        "streaming_diloco", sync_interval=8, num_fragments=2, delay_steps=2
    )

    mesh = cc.make_mesh(2, devices=jax.devices()[:1])
    program: Any = cc.RegionProgram(_loss, optax.sgd(0.1), method, params, 2, mesh=mesh)
    state = program.init(params, jax.random.key(0))
    while state.step < 24:
        state, _ = program.apply_events(_advanced(program, state))

    start = finish = None
    while start is None or finish is None:
        state = _advanced(program, state)
        num_flying = len(state.sync.in_flight)
        trace, (state, applied) = traced(lambda s=state: program.apply_events(s))
        if len(state.sync.in_flight) > num_flying:
            start = trace
        elif applied:
            finish = trace
    return Message(start, finish)


def _loss(params: Any, batch: Any, key: Any) -> tuple[jax.Array, dict]:
    del batch, key
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params)), {}


def _advanced(program: Any, state: Any) -> Any:
    """Return the state at its next event, as after inner steps that change nothing."""
    return dataclasses.replace(state, step=state.step + program.steps_to_event(state))


def described(files: tuple[str, ...]) -> Iterator[str]:
    """Yield a row for each file: its name, and the first sentence of its docstring."""
    for name in files:
        tree = ast.parse((PACKAGE / name).read_text())
        first = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        yield f"| `{name}` | {first} |"


def lines(message: Message) -> list[str]:
    """Return the lines of the page."""
    both = tuple(dict.fromkeys((*message.start.files, *message.finish.files)))
    return [
        FIRST_LINE,
        "",
        f"A fragment's start calls {len(message.start.files)} files, with "
        f"{message.start.num_moves} moves from one to another; its merge "
        f"{len(message.finish.files)}, with {message.finish.num_moves}; both together "
        f"{len(both)}.",
        "",
        "| file | what it has |",
        "| --- | --- |",
        *described(both),
        "",
        LAST_LINE,
    ]


def replaced(page: str, new: list[str]) -> str:
    """Return the page with new lines in place of those between its two marks."""
    before, _, rest = page.partition(FIRST_LINE)
    _, _, after = rest.partition(LAST_LINE)
    return before + "\n".join(new) + after


if __name__ == "__main__":
    text = lines(follow())
    print("\n".join(text))
    if "--write" in sys.argv:
        PAGE.write_text(replaced(PAGE.read_text(), text))
