"""Files are written completely or not at all, and damaged ones are named."""

import errno
import os
import socket

import pytest

from cocodc_jax import files
from tests.waiting import at_once


def test_a_file_takes_the_place_of_the_one_before(tmp_path):
    path = tmp_path / "summary.json"
    files.write_whole(path, "old\n")
    files.write_whole(path, "new\n")

    assert path.read_text() == "new\n"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_full_disk_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    files.write_whole(path, "old\n")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = f"^{path} cannot be written \\(No space left on device\\)$"
    with pytest.raises(files.UnwritableError, match=message):
        files.write_whole(path, "new\n")
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.parametrize("content", [b"", b'{"steps": 4', b"[1]", b"\xff\xfe\x00"])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "summary.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        files.read_table(path)


def test_a_folder_is_created_if_it_is_missing(tmp_path):
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        files.ensure_folder(folder)
        assert folder.is_dir()


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "folder"
    with pytest.raises(
        files.UnwritableError, match=f"{inside} cannot be written .*Not a"
    ):
        files.ensure_folder(inside)


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    # Root may write to any folder.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        files.UnwritableError, match=f"{tmp_path} cannot .*Permission denied"
    ):
        files.ensure_folder(tmp_path)


def test_lines_are_read_without_one_that_is_cut_off(tmp_path):
    path = tmp_path / "syncs.jsonl"
    assert files.read_lines(path, dict) == []
    path.write_bytes(b'{"step": 1}\n{"ste{"step": 2}\n{"step": 3}\n{"step": 4}')
    steps = files.read_lines(path, lambda line: line["step"], skips_damaged=True)
    assert steps == [1, 3]
    with pytest.raises(ValueError, match=f"^{path}, line 2 is no sync: b'{{\"ste{{"):
        files.read_lines(path, dict, "sync")


def test_a_line_is_appended_after_one_that_is_cut_off(tmp_path):
    path = tmp_path / "syncs.jsonl"
    for step in (1, 2):
        files.append_line(path, step)
    with path.open("ab") as file:
        file.write(b'{"ste')
    files.append_line(path, 3)
    assert path.read_bytes() == b'1\n2\n{"ste\n3\n'


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "metrics.jsonl"
    with socket.socket(socket.AF_UNIX) as strange, at_once():
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            strange.bind(str(path))
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()

        with pytest.raises(files.NoRegularFileError, match=f"^{path} is not a regular"):
            files.read_regular(path)
        with pytest.raises(files.NoRegularFileError):
            files.read_lines(path, dict)
        with pytest.raises(OSError, match="regular|directory"):
            files.open_regular(path, "ab")
        with pytest.raises(files.UnwritableError, match="regular|directory"):
            files.append_line(path, 1)


def test_a_regular_file_is_opened_as_any_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with files.open_regular(path, "ab") as file:
        file.write(b"1")
        assert file.name == str(path)
        assert os.get_blocking(file.fileno())


def test_links_are_followed_unless_they_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"1")
    link = tmp_path / "link"
    link.symlink_to(path)

    assert files.read_regular(link) == b"1"
    with pytest.raises(files.NoRegularFileError):
        files.open_regular(link, follows_links=False)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.read_regular(tmp_path / "none")
