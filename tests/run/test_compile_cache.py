"""Compiled programs are kept for the next command, in a folder that can be chosen."""

import os
import pathlib
import subprocess
import sys
import time

import jax
import pytest

from cocodc_jax.run import compile_cache
from cocodc_jax.run.compile_cache import DIR, MIN_TIME, keep_programs


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """No folder is chosen; the user's cache folder is `tmp_path`."""
    for name in (DIR, MIN_TIME):
        monkeypatch.setenv(name, "")  # So that monkeypatch restores it.
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "jax")  # A command that has not imported it.
    return tmp_path


def test_programs_are_kept_in_the_users_cache_folder_by_kind_of_processor(
    unset, monkeypatch
):
    folder = keep_programs()
    assert folder is not None
    assert folder.parent == unset / "cocodc_jax" / "xla"
    assert os.environ[DIR] == str(folder)
    assert float(os.environ[MIN_TIME]) < 0.1
    assert folder.stat().st_mode & 0o077 == 0

    monkeypatch.delenv(DIR)
    monkeypatch.setattr(compile_cache.platform, "machine", lambda: "another")
    assert keep_programs() != folder


def test_a_cache_that_the_user_chose_is_kept(unset, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", jax)  # The cache of the test suite.
    assert keep_programs() is None

    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setenv(DIR, "/somewhere")
    assert keep_programs() is None
    assert os.environ[DIR] == "/somewhere"

    monkeypatch.delenv(DIR)
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    assert keep_programs() is None
    assert DIR not in os.environ


@pytest.mark.parametrize("is_there", [False, True])
def test_without_a_usable_folder_no_cache_is_used(unset, monkeypatch, is_there):
    if is_there:  # Another user's.
        (unset / "cocodc_jax").mkdir()
        monkeypatch.setattr(pathlib.Path, "iterdir", lambda _: os.listdir("/nowhere"))
    else:
        (unset / "cocodc_jax").write_text("a file")
    assert keep_programs() is None
    assert DIR not in os.environ


def test_programs_unread_for_a_month_are_removed(unset, monkeypatch):
    folder = keep_programs()
    assert folder is not None
    old = folder / "old"
    young = folder / "young"
    for path, days in ((old, 31), (young, 29)):
        path.write_text("program")
        when = time.time() - days * 24 * 3600
        os.utime(path, (when, when))

    monkeypatch.delenv(DIR)
    keep_programs()
    assert not old.exists()
    assert young.exists()


def test_a_second_command_compiles_nothing(tmp_path):
    code = """
import jax, sys
from cocodc_jax.run.compile_cache import keep_programs
keep_programs()
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
print(jax.jit(lambda x: (x @ x + 1).sum())(jax.numpy.ones((8, 8))))
print(sum(name.endswith("/cache_hits") for name in hits))
"""
    environment = {k: v for k, v in os.environ.items() if k != DIR}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), MIN_TIME: "0"}

    words = [sys.executable, "-c", code]
    (one, num_hits), (other, later_hits) = (
        subprocess.check_output(words, text=True, env=environment).split()
        for _ in range(2)
    )
    assert one == other
    assert int(num_hits) == 0 < int(later_hits)
