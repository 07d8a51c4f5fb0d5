"""Checkpoints: the full state of a run, at any step, complete or not at all."""

import dataclasses
import errno
import json
import os
import pathlib
import re
import shutil
import threading

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils

from cocodc_jax import methods
from cocodc_jax.train import checksums
from cocodc_jax.train.checkpoint import RUN_FILE, CheckpointError, Checkpoints, steps_in
from tests.program import mixture
from tests.slow import mostly_slow

STREAMING = methods.get("streaming_diloco", sync_interval=4, num_fragments=2)


def walk(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def damage(folder, harm):
    """Damage a checkpoint as disks, copies and users do."""
    data = max(walk(folder / "arrays"), key=lambda path: path.stat().st_size)

    if harm == "flip":
        content = bytearray(data.read_bytes())
        for at in np.linspace(0, len(content) - 1, 4, dtype=int):
            content[at] ^= 0x10
        data.write_bytes(content)
    elif harm == "truncate":
        for path in (folder / "arrays").rglob("d/*"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif harm == "no data":
        for path in [p for p in (folder / "arrays").rglob("d") if p.is_dir()]:
            shutil.rmtree(path)
    elif harm == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        shutil.rmtree(folder / harm.removeprefix("no "))


def change_rest(folder, **values):
    """Rewrite metadata of a checkpoint, and its checksums; None removes an entry."""
    file = folder / "rest" / "metadata"
    rest = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in rest.items() if v is not None}))
    checksums.write(folder)


def save(folder, state, program, extra=None):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.save(program, state, extra or {})


def restore(folder, program):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(program)


@pytest.mark.parametrize(("name", "cut"), [("cocodc", 5), ("streaming_diloco", 6)])
def test_a_restored_run_goes_on_bit_for_bit_in_a_new_program(tiny, tmp_path, name, cut):
    """As in a new process, which compiles again; between two events, and at one.

    The same program, with every method: `test_family.py` and `test_loop.py`.
    """
    assert_goes_on_from_a_checkpoint(tiny, tmp_path, name, cut, tiny.make_program(name))


@pytest.mark.parametrize("method_name", mostly_slow(mixture.METHODS, quick=["cocodc"]))
def test_a_restored_mixture_goes_on_with_its_counts(tiny, tmp_path, method_name):
    """In flight, by another program: means by tokens are of the counts it had."""
    tiny = mixture.in_place_of(tiny)
    assert_goes_on_from_a_checkpoint(
        tiny, tmp_path, method_name, 3, tiny.make_program(method_name)
    )
    state, _ = restore(tmp_path, tiny.shared_program(method_name))
    counts = state.region.params["blocks"]["moe"]["experts"]["tokens"]
    assert state.sync.in_flight
    assert (counts > 0).any()
    assert (counts == 0).any()  # An expert that a region did not use.


def assert_goes_on_from_a_checkpoint(tiny, tmp_path, method_name, cut, again):
    program = tiny.shared_program(method_name)
    whole, before = tiny.finish(program, tiny.start(program), cut)
    assert whole.sync.in_flight

    whole = save(tmp_path, whole, program, {"position": [1, 2]})
    state, extra = restore(tmp_path, again)
    assert extra == {"position": [1, 2]}
    assert state.step == cut

    ends = []
    for form, begun in ((program, whole), (again, state)):
        end, outputs = tiny.finish(form, begun, 12 - cut)
        seen = [tiny.host((x.losses, x.aux, x.syncs)) for x in outputs]
        ends.append((tiny.numbers(end), seen))
    tiny.assert_same(*ends)


@pytest.mark.parametrize("cut", [9, 11])
def test_a_copy_from_midway_is_saved(tiny, tmp_path, cut):
    """Started at 8, midway at 10, merged at 13."""
    method = methods.get(
        "cocodc",
        sync_interval=8,
        num_fragments=1,
        delay_steps=5,
        curvature="secant",
        syncs_per_interval=1,
    )
    program = tiny.program_of(method)
    whole, _ = tiny.finish(program, tiny.start(program), 15)
    state, _ = tiny.finish(program, tiny.start(program), cut)

    assert ("midway" in state.sync.in_flight[0, 8].kept) == (cut > 10)
    _, restored = tiny.saved_and_restored(program, state, tmp_path)
    again, _ = tiny.finish(program, restored, 15 - cut)
    tiny.assert_same(*(tiny.numbers(program.synchronize(x)) for x in (again, whole)))


def test_norms_that_the_schedule_has_not_seen_are_saved(tiny, tmp_path):
    """Applied at 5, between the slots 4 and 6 at which the schedule looks."""
    method = methods.get(
        "cocodc", sync_interval=8, num_fragments=2, delay_steps=3, curvature="none"
    )
    program = tiny.program_of(method)
    state, _ = tiny.finish(program, tiny.start(program), 5)
    ((fragment, seen),) = state.sync.observed[0].items()

    assert set(seen) == {"norm"}
    save(tmp_path, state, program)
    restored, _ = restore(tmp_path, program)
    assert restored.sync.schedule.norm[fragment] == float(seen["norm"]) > 0

    ends = [
        program.synchronize(tiny.finish(program, s, 6)[0]) for s in (state, restored)
    ]
    tiny.assert_same(*map(tiny.numbers, ends))


def test_a_state_may_be_donated_as_soon_as_it_is_handed_over(tiny, tmp_path):
    """Large enough that writing takes longer than the steps that overwrite it."""
    params = {"w": np.zeros((512, 1024), np.float32)}
    program = tiny.program_of(
        methods.get("diloco", sync_interval=1),
        optimizer=optax.sgd(1.0),
        params=params,
        loss=lambda p, batch, key: ((p["w"] - batch.mean()).sum(), {}),
    )

    state = program.init(params, jax.random.key(0))
    batch = np.zeros((1, 4, 1), np.float32)
    for _ in range(2):
        state, _ = program.advance(state, batch)

    held = np.array(state.region.params["w"]), np.array(state.sync.outer.params[0]["w"])
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.save(program, state, {})
        for _ in range(20):
            state, _ = program.advance(state, batch)
        jax.block_until_ready(state.region)
        checkpoints.wait()
        restored, _ = checkpoints.restore(program)

    np.testing.assert_array_equal(restored.region.params["w"], held[0])
    np.testing.assert_array_equal(restored.sync.outer.params[0]["w"], held[1])
    assert not np.array_equal(state.region.params["w"], held[0])


def test_arrays_come_back_where_they_were(tiny, tmp_path):
    program = tiny.sharded_program("streaming_diloco", 2, 2, 2)
    state, _ = tiny.finish(program, tiny.start(program), 2)
    save(tmp_path, state, program)
    restored, _ = restore(tmp_path, program)
    old, new = (
        [leaf.sharding for leaf in jax.tree.leaves((x.region, x.sync.outer))]
        for x in (state, restored)
    )

    assert old == new
    assert set(restored.sync.in_flight) == set(state.sync.in_flight) == {(1, 2)}


def test_the_newest_are_kept(tiny, tmp_path):
    program = tiny.shared_program("diloco")
    state = tiny.start(program)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step is None
        assert checkpoints.restore(program) is None
        for _ in range(4):
            state, _ = tiny.finish(program, state, 2)
            state = checkpoints.save(program, state, {})

    assert steps_in(tmp_path) == [6, 8]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 8


@pytest.fixture(scope="module")
def two(tiny, tmp_path_factory):
    """A folder with checkpoints of steps 2 and 4, and the program that they are of."""
    folder = tmp_path_factory.mktemp("two")
    program = tiny.shared_program("diloco")
    state = tiny.start(program)
    with Checkpoints(folder, keep=3) as checkpoints:
        for _ in range(2):
            state, _ = tiny.finish(program, state, 2)
            state = checkpoints.save(program, state, {"at": state.step})
    return program, folder


@pytest.fixture
def copied(two, tmp_path):
    program, folder = two
    return program, pathlib.Path(shutil.copytree(folder, tmp_path / "copied"))


class TestFailure:
    @pytest.fixture
    def saved(self, tiny, tmp_path):
        """A state of step 4, and a folder with a checkpoint of step 2."""
        program = tiny.shared_program("diloco")
        state, _ = tiny.finish(program, tiny.start(program), 2)
        state = save(tmp_path, state, program)
        return program, tiny.finish(program, state, 2)[0], tmp_path

    def test_a_kill_while_saving_leaves_the_one_before(self, tiny, saved):
        """The remains of a killed save, as Orbax names them, are no checkpoint."""
        program, state, folder = saved
        torn = folder / "4.orbax-checkpoint-tmp"
        (torn / "arrays.orbax-checkpoint-tmp").mkdir(parents=True)
        (torn / "arrays.orbax-checkpoint-tmp" / "manifest.ocdbt").write_bytes(b"half")

        with Checkpoints(folder) as checkpoints:
            restored, _ = checkpoints.restore(program)
            assert restored.step == 2
            checkpoints.save(program, state, {})  # And its place can be taken.

        assert restore(folder, program)[0].step == 4

    def test_remains_of_a_killed_save_are_removed_by_the_only_writer(self, saved):
        program, state, folder = saved
        torn = folder / "3.orbax-checkpoint-tmp"
        torn.mkdir()

        with Checkpoints(folder) as checkpoints:
            assert checkpoints.latest_step == 2
        assert torn.exists()

        with Checkpoints(folder, cleans=True) as checkpoints:
            checkpoints.save(program, state, {})  # Waits for the removal, in a thread.
        assert not torn.exists()

    def test_an_unfinished_save_is_not_on_disk_under_its_name(
        self, tiny, saved, monkeypatch
    ):
        """The premise of the test before, on the Orbax that is installed."""
        program, state, folder = saved
        seen = []
        handler = ocp.JsonCheckpointHandler
        write = handler._save_fn

        def look(self, *args, **kwargs):
            seen.extend(path.name for path in folder.iterdir())
            return write(self, *args, **kwargs)

        monkeypatch.setattr(handler, "_save_fn", look)
        save(folder, state, program)
        assert "4" not in seen
        assert {path.name for path in folder.iterdir()} == {"2", "4", RUN_FILE}

    @pytest.mark.parametrize("when", ["start", "wait", "close"])
    def test_a_full_disk_is_named(self, tiny, saved, monkeypatch, when):
        program, state, folder = saved

        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        def save():
            with Checkpoints(folder) as checkpoints:
                if when == "start":
                    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", full)
                checkpoints.save(program, state, {})
                monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", full)
                if when == "wait":
                    checkpoints.wait()

        last = "2" if when == "start" else ""
        why = f"{folder}.*No space left on device.*checkpoint: step {last}"
        with pytest.raises(CheckpointError, match=why):
            save()

    def test_every_file_of_a_checkpoint_is_noted(self, copied):
        _, folder = copied
        noted = json.loads((folder / "4" / checksums.FILE).read_text())["blake2b"]
        files = {p.relative_to(folder / "4").as_posix() for p in walk(folder / "4")}
        later = {checksums.FILE, "_CHECKPOINT_METADATA", "commit_success.txt"}
        assert files - set(noted) <= later
        assert any(name.startswith("arrays/") for name in noted)
        assert checksums.damage(folder / "4", ("arrays", "rest")) is None

    @pytest.mark.parametrize(
        "name", [RUN_FILE, "4/_CHECKPOINT_METADATA", "2/rest/metadata", "4/arrays/x"]
    )
    def test_a_pipe_among_the_files_is_not_waited_for(self, copied, name):
        program, folder = copied
        path = folder / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)

        # Orbax reads in threads, which would wait until something is written.
        writes = threading.Timer(20, lambda: os.close(os.open(path, os.O_RDWR)))
        writes.start()

        with pytest.raises(OSError, match=f"{path} is not a regular file"):
            restore(folder, program)
        writes.cancel()

    def test_a_failed_read_of_a_bucket_does_not_count_as_damage(self, copied):
        program, folder = copied
        damage(folder / "4", "truncate")
        (folder / "4" / checksums.FILE).unlink()
        with Checkpoints(folder) as checkpoints:
            checkpoints._in_bucket = True
            with pytest.raises(Exception, match="arrays"):
                checkpoints.restore(program)
            assert checkpoints.latest_step == 4

    def test_a_save_does_not_ask_whether_the_run_is_to_stop(self, copied, monkeypatch):
        """Processes agree by the number of their calls; the loop's count."""
        program, folder = copied
        asked = []
        name = "reached_preemption_sync_point"
        monkeypatch.setattr(multihost_utils, name, asked.append)
        with Checkpoints(folder) as checkpoints:
            state, _ = checkpoints.restore(program)
            checkpoints.save(program, dataclasses.replace(state, step=6), {})
        assert not asked

    @pytest.mark.parametrize(
        ("harm", "has_checksums", "why"),
        [
            ("flip", True, r"arrays/\S+ is not what was written: its checksum differs"),
            ("truncate", True, r"arrays/\S+ has \d+ bytes of \d+"),
            ("truncate", False, "it cannot be read: "),
            ("no data", True, r"arrays/\S+ is missing"),
            ("no rest", False, "rest is missing"),
            ("no rest", True, "rest is missing"),
            ("no arrays", False, "arrays is missing"),
            ("empty", False, "arrays is missing"),
        ],
    )
    def test_a_damaged_checkpoint_is_passed_over(
        self, tiny, copied, harm, has_checksums, why, capsys
    ):
        program, folder = copied
        if not has_checksums:
            for step in "24":
                (folder / step / checksums.FILE).unlink()

        damage(folder / "4", harm)

        with Checkpoints(folder) as checkpoints:
            state, extra = checkpoints.restore(program)
            assert (state.step, extra) == (2, {"at": 2})
            assert checkpoints.latest_step == 2

            warning = capsys.readouterr().err
            moved = "moved to damaged_4, and step 2 is restored"
            assert re.search(rf"in {folder}: step 4: {why}.*; {moved}", warning)
            assert warning.count("\n") == 1

            # The run reaches the step of the damaged checkpoint again.
            state, _ = tiny.finish(program, state, 2)
            checkpoints.save(program, state, {"at": 4})

        assert restore(folder, program)[0].step == 4
        assert (folder / "damaged_4").is_dir()
        assert not capsys.readouterr().err

    @pytest.mark.parametrize("how", ["renamed", "copied", "linked", "of another run"])
    def test_a_renamed_or_copied_checkpoint_is_passed_over(
        self, tiny, copied, how, capsys
    ):
        """Its checksums match its contents, so only its step or run tells."""
        program, folder = copied
        why = "it holds step 4: the folder was renamed, copied or linked"
        at = 6

        if how == "renamed":
            (folder / "4").rename(folder / "6")
        elif how == "copied":
            shutil.copytree(folder / "4", folder / "6")
        elif how == "linked":
            (folder / "6").symlink_to("4")
        else:
            why = "it is of another run ("
            at = 4
            (folder / RUN_FILE).write_text("0123456789abcdef")
            change_rest(folder / "2", run="0123456789abcdef")

        intact = 2 if how in ("renamed", "of another run") else 4
        with Checkpoints(folder) as checkpoints:
            state, extra = checkpoints.restore(program)
            assert (state.step, extra) == (intact, {"at": intact})
            warning = capsys.readouterr().err
            assert f"step {at}: {why}" in warning
            assert f"moved to damaged_{at}, and step {intact} is restored" in warning
            with pytest.raises(ValueError, match=f"step={at} has no checkpoint"):
                checkpoints.restore(program, at)

    def test_two_swapped_checkpoints_are_both_named(self, copied):
        program, folder = copied
        (folder / "2").rename(folder / "x")
        (folder / "4").rename(folder / "2")
        (folder / "x").rename(folder / "4")
        why = "step 4: it holds step 2: .*; step 2: it holds step 4: "
        with pytest.raises(CheckpointError, match=why):
            restore(folder, program)

    def test_a_checkpoint_without_step_and_run_is_restored(self, tiny, copied):
        """Versions up to 0.38.0 wrote neither; the next checkpoint has both."""
        program, folder = copied
        (folder / RUN_FILE).unlink()
        for step in "24":
            change_rest(folder / step, step=None, run=None)
        with Checkpoints(folder) as checkpoints:
            state, _ = checkpoints.restore(program)
            assert state.step == 4
            checkpoints.save(program, tiny.finish(program, state, 2)[0], {})

        rest = json.loads((folder / "6" / "rest" / "metadata").read_text())
        assert rest["step"] == 6
        assert rest["run"] == (folder / RUN_FILE).read_text()

    def test_checkpoints_that_were_moved_keep_their_run(self, tiny, copied):
        program, folder = copied
        run = (folder / RUN_FILE).read_text()
        (folder / RUN_FILE).unlink()
        with Checkpoints(folder) as checkpoints:
            state, _ = checkpoints.restore(program)
            checkpoints.save(program, tiny.finish(program, state, 2)[0], {})
        assert (folder / RUN_FILE).read_text() == run

    def test_if_every_checkpoint_is_damaged_none_is_moved(self, copied):
        program, folder = copied
        damage(folder / "2", "truncate")
        damage(folder / "4", "flip")
        why = rf"all .* {folder} are damaged: step 4: arrays/.*; step 2: arr"
        with pytest.raises(CheckpointError, match=why):
            restore(folder, program)
        assert {path.name for path in folder.iterdir()} == {"2", "4", RUN_FILE}

    @pytest.mark.parametrize("folder", ["file", "file/checkpoints"])
    def test_a_folder_that_cannot_be_created_is_named(self, tmp_path, folder):
        (tmp_path / "file").write_text("")

        with pytest.raises(OSError, match=folder):
            Checkpoints(tmp_path / folder)

    def test_saving_a_step_twice_is_refused(self, tiny, saved):
        program, _, folder = saved
        state, _ = tiny.finish(program, tiny.start(program), 2)
        with pytest.raises(ValueError, match="holds a checkpoint of step 2, so step 2"):
            save(folder, state, program)

    def test_to_keep_no_checkpoint_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="keep=0 must be at least 1"):
            Checkpoints(tmp_path, keep=0)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"regions": 2}, r"region/key is uint32\[4, 2\] there and uint32\[2, 2\]"),
            ({"optimizer": optax.adam(0.1)}, "opt_state.* is missing there"),
            ({"method": methods.get("data_parallel")}, "missing here .and 5 more"),
            ({"method": STREAMING}, "and 5 more|there and"),
            ({"dtype": "bfloat16"}, "float32.* there and bfloat16"),
        ],
        ids=["regions", "optimizer", "data_parallel", "fragments", "dtype"],
    )
    def test_a_checkpoint_of_another_program_is_refused(
        self, tiny, saved, change, message
    ):
        _, _, folder = saved
        dtype = change.pop("dtype", "float32")
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tiny.make_params()
        )
        options = {"method": tiny.METHODS["diloco"], "params": params} | change
        program = tiny.program_of(**options)

        with pytest.raises(ValueError, match=f"step 2 in {folder}.*{message}"):
            restore(folder, program)
