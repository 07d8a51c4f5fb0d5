"""Times of steps on a GPU."""

import pytest

from cocodc_jax.run import timeline


@pytest.mark.gpu
def test_one_gpu_is_as_fast_during_a_sync(command, tmp_path):
    """Two regions share it; messages cross between their hosts: 3 % at most."""
    flags = (
        "--regions=2",
        "--",
        "--preset=small",
        "--method=streaming_diloco",
        "--num_fragments=2",
        "--sync_interval=40",
        "--delay_steps=10",
        "--steps=410",
        "--warmup_steps=0",
        "--eval_every=0",
        "--checkpoint_every=0",
        f"--workdir={tmp_path}",
    )

    # Each process would take all of the memory.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": ""}
    process = command("experiments.launch_local", *flags, env=env)
    _, error = process.communicate(timeout=1200)
    assert process.returncode == 0, error

    measured = timeline.read(tmp_path, timeline.first_warm_step(tmp_path))
    beside, alone = timeline.step_s_in_flight(measured)
    assert beside <= 1.03 * alone
