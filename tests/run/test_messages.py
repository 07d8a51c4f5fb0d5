"""What a program says once, and what is not kept back."""

import io
import logging
import threading

import pytest

from cocodc_jax.run.messages import say_once


@pytest.mark.parametrize(("name", "is_said"), [("asyncio", False), ("other", True)])
def test_tracebacks_of_what_is_raised_elsewhere_are_left_out(name, is_said):
    said, before = io.StringIO(), threading.excepthook
    handler = logging.StreamHandler(said)
    say_once(handler)
    threading.excepthook = before
    log = logging.Logger(name)
    log.addHandler(handler)
    log.error("plain")
    log.error("with a traceback", exc_info=OSError("full"))
    assert said.getvalue().startswith("plain\n")
    assert ("full" in said.getvalue()) == is_said


def test_threads_of_others_are_heard(monkeypatch):
    heard = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    say_once(logging.NullHandler())

    def full():
        raise OSError("full")

    class OfTensorBoard(threading.Thread):
        __module__ = "tensorboardX.event_file_writer"

    for kind in (OfTensorBoard, threading.Thread):
        thread = kind(target=full)
        thread.start()
        thread.join()
    assert [type(args.thread) for args in heard] == [threading.Thread]
