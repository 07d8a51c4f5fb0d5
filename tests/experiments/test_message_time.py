"""The study of a sync's time over both kinds of channel."""

import pytest

from experiments import message_time


def test_both_channels_are_timed(tmp_path, call):
    words = [f"--via={tmp_path}", "--kib=1", "--syncs=2", "--regions=3"]
    sockets, folder = call(message_time, *words)[0].splitlines()
    assert "1 KiB sockets" in sockets
    assert f"1 KiB via {tmp_path.name}" in folder
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--kib=-1", "--kib=-1 must be numbers of at least 1"),
        ("--kib=", "--kib= must be numbers of at least 1"),
        ("--kib=abc", "--kib=abc must be whole numbers separated by commas"),
        ("1024", "unexpected argument '1024'; flags begin with --"),
    ],
)
def test_a_wrong_flag_is_refused_in_a_line(word, message, refused):
    assert refused(message_time, word) == message


def test_a_folder_that_cannot_be_created_is_named(refused, tmp_path):
    (tmp_path / "file").touch()
    message = refused(message_time, f"--via={tmp_path / 'file'}")
    assert message.startswith(f"--via='{tmp_path / 'file'}' cannot be reached: ")
