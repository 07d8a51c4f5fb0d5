"""What a sync on its way costs the steps beside it, in two processes of one machine."""

import pytest

from experiments import timeline

MEASURED = [
    "--method=streaming_diloco", "--num_fragments=2", "--sync_interval=40",
    "--warmup_steps=0", "--eval_every=0", "--checkpoint_every=0",
]  # fmt: skip


def seconds_of_a_step(command, workdir, flags, env=None) -> tuple[float, float]:
    """With a sync on its way, and without."""
    words = ["--regions=2", "--", *MEASURED, *flags, f"--workdir={workdir}"]
    process = command("experiments.launch_local", *words, env=env)
    _, error = process.communicate(timeout=900)
    assert process.returncode == 0, error
    delay = next(int(f.split("=")[1]) for f in flags if f.startswith("--delay_steps"))
    found = timeline.read(workdir, timeline.warm_step(40, delay))
    return timeline.step_s_in_flight(found)


@pytest.mark.slow
def test_paced_steps_take_as_long_beside_a_sync(command, corpus, tmp_path):
    """On CPUs, where steps leave the cores to the exchange for most of the time."""
    flags = ["--preset=smoke", "--steps=240", "--step_seconds=0.02", "--delay_steps=1"]
    busy, quiet = seconds_of_a_step(command, tmp_path, [*flags, *corpus])
    assert busy > 0.019
    assert busy < 1.5 * quiet


@pytest.mark.gpu
def test_one_gpu_is_as_fast_beside_a_sync(command, tmp_path):
    """Two regions share it; messages cross between their hosts (issue 5: 3 %)."""
    flags = ["--preset=small", "--steps=400", "--delay_steps=10"]
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    busy, quiet = seconds_of_a_step(command, tmp_path, flags, env)
    assert busy <= 1.03 * quiet
