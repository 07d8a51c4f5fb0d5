"""Flags of a program: what they build, and the errors of wrong ones."""

import io
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

from cocodc_jax.run.config import flags
from cocodc_jax.run.exits import as_a_command, one_line, say_once

PROGRAM = """
from cocodc_jax.run.config import flags
flags.define()
def main():
    with flags.usage_errors():
        config = flags.config()
    print(config.method.method, config.model.width, config.run.seed, config.data.seed)
flags.run_main(main)
"""


RUN_MAIN = "flags.run_main(main)"


class Program:
    """The same, for `call`."""

    define = staticmethod(flags.define)

    @staticmethod
    def main():
        with flags.usage_errors():
            config = flags.config()
        numbers = config.model.width, config.run.seed, config.data.seed
        print(config.method.method, *numbers)


def command(*arguments, main=RUN_MAIN):
    """Run the program, or with other lines in place of its last one."""
    words = [sys.executable, "-c", PROGRAM.replace(RUN_MAIN, main), *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_run_is_its_preset_with_the_flags_given(call):
    words = ("--preset=smoke", "--method=diloco", "--width=64", "--seed=3")
    assert call(Program, *words)[0] == "diloco 64 3 3\n"


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (20, 2), (40, 3), (41, 40), (480, 40)]
)
def test_a_preset_warms_up_for_its_share_of_a_short_run(call, steps, warmup):
    _, err = call(Program, "--preset=tiny", f"--steps={steps}")
    assert flags.config().optimizer.warmup_steps == warmup
    note = f"note: steps={steps} are too few for the warmup_steps=40 of preset tiny"
    assert err.startswith(note) if steps <= 40 else not err


def test_a_command_shows_its_help():
    text = command("--help=all").stdout.split()
    # Help of an argument names its methods; values are those of the preset.
    message = "lambda, weight of the compensation's correction. For cocodc (0.3),"
    assert message in " ".join(text)
    assert "--regions=4 regions that train, M." in " ".join(text)
    assert command("--helpfull").stdout.split() == text
    assert "--width" not in command("--help").stdout


def test_a_reader_that_goes_ends_the_program_in_silence():
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-c", PROGRAM, "--help"]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_result_that_cannot_be_written_is_named_in_one_line(tmp_path):
    writes = "from cocodc_jax import files; main = lambda: files.write_whole"
    done = command(main=f"{writes}({str(tmp_path)!r}, '')\n{RUN_MAIN}")
    message = f"error: {tmp_path} cannot be written (Is a directory)\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_an_interrupt_is_reported_in_one_line():
    program = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored in the background.
main = lambda: signal.raise_signal(signal.SIGINT)
"""
    done = command(main=program + RUN_MAIN)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "interrupted\n")


def test_a_broken_pipe_other_than_standard_output_is_raised(capfd):
    with pytest.raises(BrokenPipeError), as_a_command():
        raise BrokenPipeError


WRONG = [
    ("--preset=tinny", "--preset='tinny' is unknown"),
    ("--method=dilocoo", "--method='dilocoo' is unknown"),
    ("--delay_step=3", "Unknown command line flag 'delay_step'. Did you"),
    ("--steps=many", "--steps=many must be a whole number"),
    ("train", "unexpected argument 'train'"),
    ("--steps=1.5", "--steps=1.5 must be a whole number"),
    ("--sync_interval=ten", "--sync_interval=ten must be a whole number"),
    ("--inner_lr=fast", "--inner_lr=fast must be a number"),
    ("--qk_norm=maybe", "--qk_norm=maybe must be true or false"),
    ("--workdir=~nobody-here/a", "--workdir=~nobody-here/a must be a path without ~"),
    (
        "--method=diloco --mixing_alpha=0.5",
        "--mixing_alpha=0.5 has no meaning for diloco, which takes sync_interv",
    ),
    (
        "--preset=tiny --steps=20 --warmup_steps=30",
        "--warmup_steps=30 must be less than steps=20",
    ),
]


@pytest.mark.parametrize(("words", "line"), WRONG)
def test_a_wrong_flag_is_named_in_one_line_with_exit_code_2(words, line, refused):
    assert refused(Program, *words.split()).startswith(line)


@pytest.mark.parametrize(("words", "line"), WRONG[2:5:2])
def test_wrong_flags_end_a_command_with_exit_code_2(words, line):
    """absl reads the flags, and finds words that are no flags."""
    done = command(*words.split())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {line}")


class SeveralMethods:
    """A program that trains several methods, for `call`."""

    @staticmethod
    def define():
        flags.define(without=("method",))

    @staticmethod
    def main():
        config = flags.config()
        print(config.model.width, dict(config.method.where_taken)["mixing_alpha"])


def test_only_the_flags_of_other_methods_are_refused_for_several(call):
    words = ("--preset=smoke", "--mixing_alpha=0.5", "--width=64")
    assert call(SeveralMethods, *words)[0] == "64 0.5\n"
    flags.check_methods(["diloco", "streaming_diloco"])
    with pytest.raises(ValueError, match="mixing_alpha=0.5 has no meaning for diloco,"):
        flags.check_methods(["diloco", "cocodc"])


def test_the_run_package_loads_neither_jax_nor_absl():
    """It loads lazily, from any folder."""
    program = """
import sys
from cocodc_jax import run
assert not {"jax", "absl"} & set(sys.modules)
assert run.TrainConfig and run.PRESETS["smoke"] and run.prepare and run.Session
assert all(hasattr(run, name) for name in run.__all__)
assert "cocodc_jax.run.config.flags" not in sys.modules
assert "experiments" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_message_begins_with_the_flag_as_it_is_typed():
    assert one_line("steps=0 is\n  wrong", ["steps"]) == "--steps=0 is wrong"
    assert one_line("step=0 is wrong", ["steps"]) == "step=0 is wrong"


@pytest.mark.parametrize(("name", "is_said"), [("asyncio", False), ("other", True)])
def test_tracebacks_logged_by_asyncio_are_left_out(name, is_said):
    output = io.StringIO()
    before = threading.excepthook
    handler = logging.StreamHandler(output)
    say_once(handler)
    threading.excepthook = before

    log = logging.Logger(name)
    log.addHandler(handler)
    log.error("plain")
    log.error("with a traceback", exc_info=OSError("full"))

    assert output.getvalue().startswith("plain\n")
    assert ("full" in output.getvalue()) == is_said


def test_errors_of_threads_but_tensorboards_are_reported(monkeypatch):
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


NO_EFFECT = [
    ("--balance_loss=0.1", "for a model without experts"),
    ("--router_z_loss=0.1", "for a model without experts"),
    ("--experts_per_token=1", "for a model without experts"),
    ("--expert_dispatch=blocks", "for a model without experts"),
    ("--lora_alpha=8", "without adapters"),
    ("--lora_targets=query", "without adapters"),
    ("--compensation_strength=0.5 --curvature=none", "with --curvature=none"),
    ("--random_routing", "with one stage"),
]


@pytest.mark.parametrize(("words", "why"), NO_EFFECT)
def test_a_flag_without_effect_is_refused(words, why, refused):
    error = refused(Program, "--preset=smoke", "--method=cocodc", *words.split())
    name = words.split()[0].split("=")[0]
    assert error.startswith(f"{name}=")
    assert f" has no effect {why}" in error


@pytest.mark.parametrize(
    "words",
    [
        "--preset=moe_tiny --balance_loss=0.1 --expert_dispatch=blocks",
        "--preset=moe_tiny --experts_per_token=1",  # Its preset has experts.
        "--lora_rank=2 --lora_alpha=8 --init_from=there",
        "--compensation_strength=0.5",
        "--random_routing --stages=2",
        "--preset=smoke",  # Defaults and presets are not given.
    ],
)
def test_a_flag_with_an_effect_is_taken(words, call):
    call(Program, *words.split())


class Trains(Program):
    """A program that checks the flags of one process, or of several."""

    @staticmethod
    def main():
        with flags.usage_errors():
            number = flags.processes().num_processes
            flags.check_processes([flags.config()], number)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--heartbeat_timeout_s=60", "with one process"),
        ("--start_timeout_s=60", "with one process"),
        ("--all_reduce=ring", "where messages cross in the program"),
    ],
)
def test_flags_of_several_processes_are_refused_for_one(words, why, refused, call):
    assert f"{words} has no effect {why}" in refused(Trains, words)
    several = "--num_processes=2 --process_id=0 --coordinator_address=localhost:1"
    call(Trains, words, *several.split())


def test_messages_on_the_outer_mesh_have_an_algorithm(call):
    call(Trains, "--all_reduce=ring", "--exchange=outer")
