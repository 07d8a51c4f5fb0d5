"""Make a session from a configuration; all checks run before it compiles."""

import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from cocodc_jax import models
from cocodc_jax.data import load
from cocodc_jax.data.text_data import TextData
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.run import build
from cocodc_jax.run.adoption import Source
from cocodc_jax.run.attend import NO_TRACKING, Tracking
from cocodc_jax.run.bucket import Bucket, folder_here
from cocodc_jax.run.config.elastic_flags import NOT_ELASTIC, ElasticFlags
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.run.hugging_face import model_of
from cocodc_jax.run.monitor import NO_MONITORING, Monitoring
from cocodc_jax.run.processes import ONE_PROCESS, Processes, check_alike
from cocodc_jax.run.resume import CHECKPOINTS, check_exchange, check_workdir, claim
from cocodc_jax.run.session import Session
from cocodc_jax.train.checkpoint import steps_in


def prepare(
    config: TrainConfig,
    workdir: str | pathlib.Path,
    open_text: Callable[..., TextData] = load,
    earlier: Sequence[Session] = (),
    processes: Processes = ONE_PROCESS,
    tracking: Tracking = NO_TRACKING,
    elastic: ElasticFlags = NOT_ELASTIC,
    monitoring: Monitoring = NO_MONITORING,
) -> Session:
    """Open the data, lay out the devices and build the program; compiles nothing.

    Args:
      config: of the run.
      workdir: its folder, or one of a bucket (`gs://`); made if missing.
      open_text: `cocodc_jax.data.load`, or a cached version of it.
      earlier: sessions whose compiled programs to reuse if they are the same.
      processes: of the run, which are connected already.
      tracking: where process 0 also shows its records.
      elastic: flags of elastic regions, if each is a separate job.
      monitoring: metrics of each process, and the command on events.

    Raises:
      ValueError: naming the flag, its value and a value that works.
    """
    # Defaults may change between versions; a run keeps those it began with.
    config = config.resolve()
    build.check_model(config, config.model)  # Before the devices are made.

    place = elastic.place(config.run.exchange, config.run.regions)
    if place is not None and processes.num_processes != 1:
        elastic.check_several(processes.num_processes)

    run = build.own_part(config, place)
    devices = build.use_devices(run, processes.num_processes)
    mesh = build.mesh_of(run, devices)
    left = len(jax.devices()) - mesh.size
    if left and not run.devices and devices[0].platform != "cpu":
        if jax.process_index() == 0:
            print(
                f"note: {left} devices are not used: --data_axis gives a region more",
                file=sys.stderr,
            )

    monitoring.check()
    tracking.check()  # Asks JAX which process this is: after the devices are made.
    check_alike(config.to_json())

    if place is not None:
        workdir = f"{os.fspath(workdir)}/region_{place.region}"
    bucket = Bucket.of(workdir)
    if bucket:
        bucket.begin(jax.process_index())
    workdir = bucket.workdir if bucket else folder_here(workdir)
    folder = bucket.folder if bucket else workdir
    check_exchange(folder, is_elastic=place is not None)
    check_workdir(config, workdir, folder / CHECKPOINTS)
    if not steps_in(folder / CHECKPOINTS):
        Source.of(config)  # For its checks; a run that has begun does not use it.

    text = build.open_for(open_text, config, mesh, place)
    check_alike({"text": text.fingerprint})
    model = model_of(config, text.tokenizer)
    build.check_model(config, model)

    alike = [other for other in earlier if (other.model, other.mesh) == (model, mesh)]
    program = _program_of(alike, config)
    if program is None:
        program = build.build_program(config, model, mesh, place)
    evaluate = _evaluate_of(alike, config)
    if evaluate is None:
        evaluate = build.build_evaluate(config, model, mesh, text)

    session = Session(
        config=config,
        workdir=workdir,
        text=text,
        model=model,
        mesh=mesh,
        program=program,
        evaluate=evaluate,
        tracking=tracking,
        monitoring=monitoring,
        place=place,
        elastic=elastic,
        bucket=bucket,
    )
    if jax.process_index() == 0:
        claim(config, workdir, folder / CHECKPOINTS)
    return session


def _program_of(
    sessions: Sequence[Session], config: TrainConfig
) -> RegionProgram | None:
    """Return the program of an earlier session, if one is the same."""
    key = build.program_key(config)
    for session in sessions:
        if build.program_key(session.config) == key:
            return session.program
    return None


def _evaluate_of(
    sessions: Sequence[Session], config: TrainConfig
) -> Callable[[models.Params], jax.Array] | None:
    """Return the evaluation of an earlier session, if one has the same batches."""
    key = _evaluation(config)
    for session in sessions:
        if _evaluation(session.config) == key:
            return session.evaluate
    return None


def _evaluation(config: TrainConfig) -> Any:
    """Return what the validation batches depend on."""
    return config.replace(seed=0).data, config.run.eval_batches
