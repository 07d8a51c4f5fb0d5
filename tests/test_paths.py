"""Paths as users write them, with and without a home folder."""

import os
import pathlib
import pwd
import tempfile

import pytest

from cocodc_jax import paths
from cocodc_jax.paths import NoHomeError, cache_dir, without_tilde
from cocodc_jax.run.compile_cache import DIR, keep_programs


@pytest.fixture
def no_home(monkeypatch, tmp_path):
    """A user of a container: no HOME, and no entry among the users."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(
        "MPLCONFIGDIR", "/elsewhere"
    )  # Which the tested code does not set.
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    paths._temporary_cache.cache_clear()
    yield tmp_path
    paths._temporary_cache.cache_clear()


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert without_tilde("~/runs/a") == "/home/me/runs/a"
    assert without_tilde("~/runs/a@40") == "/home/me/runs/a@40"
    assert without_tilde("~") == "/home/me"


@pytest.mark.parametrize(
    "path", ["", "runs/~", "./~", "/a/~/b", "gs://bucket/~", "s3://~/run"]
)
def test_a_tilde_that_is_not_first_is_kept(path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert without_tilde(path) == path


@pytest.mark.parametrize("path", ["~/runs", "~nobody-here/runs"])
def test_a_home_that_is_not_known_is_refused(path, no_home):
    with pytest.raises(NoHomeError, match=f"{path} is below .* without ~"):
        without_tilde(path)


def test_an_empty_home_is_refused(no_home, monkeypatch):
    monkeypatch.setenv("HOME", "")  # Else ~/runs would be /runs.
    with pytest.raises(NoHomeError, match="~/runs is below"):
        without_tilde("~/runs")


def test_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == pathlib.Path("/somewhere/cocodc_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == pathlib.Path.home() / ".cache" / "cocodc_jax"
    assert cache_dir("/given") == pathlib.Path("/given")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_dir("~/data") == pathlib.Path("/home/me/data")


def test_without_a_home_a_private_folder_is_used_with_one_warning(no_home, capfd):
    folder = no_home / f"cocodc_jax_{os.getuid()}"
    assert cache_dir() == folder == cache_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    warning = capfd.readouterr().err
    assert warning.count("\n") == 1
    assert "there is no home folder" in warning
    assert str(folder) in warning
    assert cache_dir("/given") == pathlib.Path("/given")


def test_a_home_that_cannot_be_written_to_is_only_read(no_home, monkeypatch):
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cache_dir().parent == no_home
    # Data that others prepared there are read.
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    assert cache_dir() == pathlib.Path("/.cache/cocodc_jax")


def test_a_temporary_folder_that_others_can_write_to_is_refused(no_home, monkeypatch):
    (no_home / f"cocodc_jax_{os.getuid()}").mkdir(mode=0o777)
    (no_home / f"cocodc_jax_{os.getuid()}").chmod(0o777)
    with pytest.raises(
        ValueError, match="is another user's; name a folder by data_dir"
    ):
        cache_dir()
    monkeypatch.delenv(DIR, raising=False)
    assert keep_programs() is None  # No cache is no error.
