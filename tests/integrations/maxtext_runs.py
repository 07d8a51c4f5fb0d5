"""Runs of MaxText beside plain loops: a child of `test_maxtext.py`.

    python -m tests.integrations.maxtext_runs {alone,stacked} FOLDER
    python -m tests.integrations.maxtext_runs region FOLDER INDEX
    python -m tests.integrations.maxtext_runs launcher FOLDER INDEX REGIONS DIE_AT

Every run leaves its last parameters in `FOLDER/NAME/RUN.npz`, and what else it saw in
`FOLDER/NAME/facts.json`. The plain loops of `alone` import nothing of `cocodc_jax`.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

NUM_REGIONS = 2
NUM_STEPS = 13
INTERVAL = 4
DELAY = 1
ALPHA = 0.5
OUTER_LR = 0.4
MOMENTUM = 0.9
SGD = {"opt_type": "sgd"}
# Two programs round differently, which Adam's division amplifies unless eps is large.
ADAM = {"opt_type": "adamw", "adam_eps": 1e-3, "learning_rate": 0.01}
# What a save, in the middle of a run, finds in flight.
SAVED_AT = 4

# Of the documentation's launcher: all steps, and where one region waits for another.
LAUNCHED_STEPS = 30
MEETING = 21

# DiLoCo that MaxText has, too.
OWN = {"sync_interval": INTERVAL, "outer_lr": 0.7, "outer_momentum": MOMENTUM}

# As MaxText runs all regions in one program over its own mesh axis. Its own syncs never
# come due.
STACKED = {
    "enable_diloco": True,
    "diloco_sync_period": 10**6,
    "ici_diloco_parallelism": NUM_REGIONS,
}


def of_layer(path: str) -> bool:
    """Whether a leaf stacks layers."""
    return "'layers'" in path


def by_pattern(path: str, shape: tuple[int, ...]) -> list:
    """Return where each fragment has a leaf: the MLPs, and all else."""
    return ["'mlp'" in path, "'mlp'" not in path]


def by_layer(path: str, shape: tuple[int, ...]) -> list:
    """Return where each fragment has a leaf: every second one of the model's units.

    Those are the embedding, the layers, the last norm, and the head.
    """
    if not of_layer(path):
        return ["decoder_norm" not in path, "decoder_norm" in path]
    layers = np.arange(shape[1]).reshape(-1, *[1] * (len(shape) - 2))
    return [layers % 2 == 1, layers % 2 == 0]


# --- Plain loops around MaxText's step, in NumPy.


def data_parallel(folder: Path) -> dict:
    """Train on the joined batch of all regions."""
    from tests.integrations import maxtext_job as mt

    job = mt.Job(folder, ici_data_parallelism=2, ici_fsdp_parallelism=2, **SGD)
    start = mt.numbers(job.params)
    for step in range(NUM_STEPS):
        job.step(mt.joined([mt.batch_of(step, r) for r in range(NUM_REGIONS)]))
    end = mt.numbers(job.params)
    return {"start": start, "diloco0": end, "diloco1": end}


def plain_streaming(job, where) -> list[dict]:
    """Train by Streaming DiLoCo (arXiv 2501.18512, algorithm 2); return all regions.

    Fragment k starts at the steps that are k H / K modulo H.
    """
    from tests.integrations import maxtext_job as mt

    params = mt.numbers(job.params)
    states = [job.state, jax.tree.map(jax.numpy.copy, job.state)]
    outer = {path: x.astype(np.float64) for path, x in params.items()}
    momentum = {path: np.zeros_like(x) for path, x in outer.items()}
    masks = {path: where(path, x.shape) for path, x in outer.items()}
    num_fragments = len(next(iter(masks.values())))
    in_flight = {}

    for step in range(1, NUM_STEPS + 1):
        regions = []
        for region in range(NUM_REGIONS):
            job.state = states[region]
            job.step(mt.batch_of(step - 1, region))
            states[region] = job.state
            regions.append(mt.numbers(job.params))

        if step in in_flight:
            k, means = in_flight.pop(step)
            for path, mean in means.items():
                mask = masks[path][k]
                velocity = MOMENTUM * momentum[path] + mean
                new = outer[path] - OUTER_LR * (mean + MOMENTUM * velocity)
                momentum[path] = np.where(mask, velocity, momentum[path])
                outer[path] = np.where(mask, new, outer[path])
                for params in regions:
                    local = params[path]
                    mixed = ALPHA * local + (1 - ALPHA) * outer[path]
                    params[path] = np.where(mask, mixed, local).astype(np.float32)

            for region, params in enumerate(regions):
                job.state = states[region]
                job.params = mt.with_numbers(job.params, params)
                states[region] = job.state

        for k in range(num_fragments):
            if step % INTERVAL == k * INTERVAL // num_fragments:
                means = {
                    path: outer[path]
                    - np.mean([params[path] for params in regions], axis=0)
                    for path in outer
                }
                in_flight[step + DELAY] = (k, means)
    return regions


def alone(folder: Path) -> None:
    """Run all plain loops."""
    from tests.integrations import maxtext_job as mt

    results = data_parallel(folder)
    devices = jax.devices()[:2]
    for run, where in (("patterns", by_pattern), ("layers", by_layer)):
        job = mt.Job(folder, devices, ici_fsdp_parallelism=2, **ADAM)
        for region, params in enumerate(plain_streaming(job, where)):
            results[f"{run}{region}"] = params
    save(folder / "alone", results, versions())


# --- The same with `RegionSync`.


def streaming(**options):
    """Make the method of the plain loop."""
    import cocodc_jax as cc

    return cc.methods.get(
        "streaming_diloco",
        sync_interval=INTERVAL,
        num_fragments=2,
        delay_steps=DELAY,
        mixing_alpha=ALPHA,
        outer_lr=OUTER_LR,
        outer_momentum=MOMENTUM,
        **options,
    )


def methods() -> dict:
    """Make the method of each run, and the options of MaxText."""
    import cocodc_jax as cc

    same = {"sync_interval": INTERVAL, "num_fragments": 2, "delay_steps": DELAY}
    averaging = {"sync_interval": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    return {
        "diloco": (cc.methods.get("diloco", **averaging), SGD),
        "patterns": (streaming(), ADAM),
        "layers": (streaming(), ADAM),
        "own": (cc.methods.get("diloco", **OWN), ADAM),
        "cocodc": (cc.methods.get("cocodc", **same), ADAM),
        "one_bit": (streaming(compress="ef+sign"), ADAM),
    }


def fragments_of(run: str, params):
    """Cut one region's parameters as a run's plain loop does.

    The package's own cut, by layers, is that of all runs but one.
    """
    from cocodc_jax.sync.cutting import cut_by_patterns

    if run == "patterns":
        return cut_by_patterns(params, ["mlp", "."])
    return None


class Run:
    """A MaxText job with a `RegionSync`, and its records."""

    def __init__(self, job, method, regions, **options):
        import cocodc_jax as cc

        self.job = job
        params = job.params
        self.sync = cc.RegionSync(method, params, regions, **options)
        self.state = self.sync.init(params)

    def train(self, batch_of, end: int) -> list[float]:
        """Do MaxText's steps, each with the line after it; return the losses."""
        losses = []
        while self.state.step < end:
            losses.append(self.job.step(batch_of(self.state.step)))
            self.job.params, self.state = self.sync.after_step(
                self.job.params, self.state
            )
        return losses


def warmed(job, batch_of) -> tuple:
    """Do two steps of MaxText alone; return its first state, the form, its programs.

    With `enable_diloco` its first state has another structure than those of its steps,
    so that its own second step compiles again.
    """
    first = job.state
    job.state = jax.tree.map(jax.numpy.copy, first)
    job.step(batch_of(0))
    job.step(batch_of(1))
    return first, form_of(job.state), job.step_fn._cache_size()


def form_of(tree) -> tuple:
    """Return structure and shardings of a tree."""
    return jax.tree.structure(tree), [x.sharding for x in jax.tree.leaves(tree)]


def stacked(folder: Path) -> None:
    """Run all regions in one program, over MaxText's own mesh axis."""
    from tests.integrations import maxtext_job as mt

    def batch_of(step):
        return mt.stacked([mt.batch_of(step, r) for r in range(NUM_REGIONS)])

    results = {}
    facts = {}
    jobs = {}
    for run, (method, options) in methods().items():
        key = json.dumps(options)
        if key not in jobs:
            job = mt.Job(folder, ici_fsdp_parallelism=2, **STACKED, **options)
            jobs[key] = job, *warmed(job, batch_of)
        job, first, form, num_programs = jobs[key]
        job.state = jax.tree.map(jax.numpy.copy, first)

        one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), job.params
        )
        trained = Run(job, method, NUM_REGIONS, fragments=fragments_of(run, one))
        losses = trained.train(batch_of, NUM_STEPS)
        params = mt.numbers(job.params)
        for region in range(NUM_REGIONS):
            results[f"{run}{region}"] = {path: x[region] for path, x in params.items()}
        facts[run] = {
            "losses": losses,
            "same_form": form_of(job.state) == form,
            "recompiled": job.step_fn._cache_size() - num_programs,
            "bytes_sent": trained.state.bytes_sent,
        }
        if run == "patterns":
            job.state = jax.tree.map(jax.numpy.copy, first)
            facts[run]["resumed"] = resume(folder, job, method, batch_of, params)

    for region, params in enumerate(maxtexts_own(folder, batch_of)):
        results[f"maxtext{region}"] = params
    save(folder / "stacked", results, facts)


def maxtexts_own(folder: Path, batch_of) -> list[dict]:
    """Train by MaxText's own DiLoCo, without this package; return all regions."""
    from tests.integrations import maxtext_job as mt

    options = STACKED | ADAM
    options["diloco_sync_period"] = OWN["sync_interval"]
    options["diloco_outer_lr"] = OWN["outer_lr"]
    options["diloco_outer_momentum"] = OWN["outer_momentum"]
    job = mt.Job(folder, ici_fsdp_parallelism=2, **options)
    for step in range(NUM_STEPS):
        job.step(batch_of(step))
    params = mt.numbers(job.params)
    return [{path: x[r] for path, x in params.items()} for r in range(NUM_REGIONS)]


def resume(folder: Path, job, method, batch_of, expected) -> dict:
    """Save a run in mid-flight by Orbax, restore into new objects and go on."""
    import orbax.checkpoint as ocp

    from tests.integrations import maxtext_job as mt

    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), job.params)
    fragments = fragments_of("patterns", one)
    run = Run(job, method, NUM_REGIONS, fragments=fragments)
    run.train(batch_of, SAVED_AT)
    arrays, note = run.sync.checkpoint(run.state)
    in_flight = len(run.state.sync.in_flight)

    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, job.state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "trainer", job.state)
        checkpointer.save(folder / "sync", arrays)
    note = json.loads(json.dumps(note))

    again = Run(job, method, NUM_REGIONS, fragments=fragments)
    with ocp.StandardCheckpointer() as checkpointer:
        job.state = checkpointer.restore(folder / "trainer", shapes)
        arrays = checkpointer.restore(folder / "sync", again.sync.abstract(note))
    again.state = again.sync.restore(arrays, note)
    again.train(batch_of, NUM_STEPS)
    params = mt.numbers(job.params)
    same = all(np.array_equal(params[path], expected[path]) for path in params)
    return {"in_flight": in_flight, "bit_for_bit": same}


def region(folder: Path, index: int) -> None:
    """Run one elastic region: a MaxText of its own, no axis of regions."""
    import cocodc_jax as cc
    from tests.integrations import maxtext_job as mt

    devices = jax.devices()[:2]
    results = {}
    facts = {}
    jobs = {}
    for run, (method, options) in methods().items():
        key = json.dumps(options)
        if key not in jobs:
            job = mt.Job(folder, devices, ici_fsdp_parallelism=2, **options)
            jobs[key] = job, *warmed(job, lambda i: mt.batch_of(i, index))
        job, first, form, num_programs = jobs[key]
        job.state = jax.tree.map(jax.numpy.copy, first)

        place = cc.Place(
            region=index,
            addresses=(),
            key=b"a shared secret of 32 bytes ....",
            via=str(folder / f"via_{run}"),
            regions=NUM_REGIONS,
        )
        trained = Run(
            job,
            method,
            NUM_REGIONS,
            fragments=fragments_of(run, job.params),
            transport=cc.Transport("elastic", place=place),
        )
        with trained.sync as sync:
            job.params, trained.state = sync.join(job.params, trained.state)
            losses = trained.train(lambda i: mt.batch_of(i, index), NUM_STEPS)
            outer = sync.outer_params(trained.state, job.params)

        results[f"{run}{index}"] = mt.numbers(job.params)
        results[f"{run}_outer"] = mt.numbers(outer)
        facts[run] = {
            "losses": losses,
            "same_form": form_of(job.state) == form,
            "recompiled": job.step_fn._cache_size() - num_programs,
            "bytes_sent": trained.state.bytes_sent,
        }
    save(folder / f"region{index}", results, facts)


def launcher(folder: Path, index: int, regions: int, die_at: int) -> None:
    """Run the documentation's launcher, in which MaxText's own loop trains.

    The last region kills itself at step `die_at`, the first time. Others wait at
    `MEETING` for its return.
    """
    from tests.integrations import maxtext_job as mt

    key = folder / "key"
    run_folder = folder / f"run{index}"
    places = {"REGION": index, "REGIONS": regions, "VIA": folder / "via", "KEY": key}
    os.environ |= {name: str(value) for name, value in places.items()}
    script = runpy.run_path("docs/recipes/maxtext/train.py", run_name="launcher")
    train = script["train"]
    region = script["region"]
    with_sync = train.training_loop_iteration
    is_last = index == regions - 1
    is_first = not run_folder.exists()
    last = {}
    losses = {}

    def watched(device, python, fixed):
        step = python["step"]
        last.setdefault("step_fn", device["p_train_step"])
        if is_last and is_first and step == die_at > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while die_at and not is_last and step == MEETING and not back.exists():
            region.sync.meet(device["state"], region.state)
            time.sleep(0.05)

        metrics = with_sync(device, python, fixed)
        if is_last and not is_first and not back.exists():
            back.write_text(f"{region.state.step}")
        losses[region.state.step - 1] = float(metrics["scalar"]["learning/loss"])
        last["state"] = device["state"]
        return metrics

    back = folder / "back"
    train.training_loop_iteration = watched
    # The regions' data are the same; their learning rates are not.
    options = mt.OPTIONS | {
        "run_name": f"run{index}",
        "base_output_directory": folder,
        "learning_rate": 0.1 / (1 + index),
        "steps": LAUNCHED_STEPS,
        "enable_checkpointing": True,
        "async_checkpointing": False,
        "checkpoint_period": 6,
        "ici_fsdp_parallelism": 4,
        "per_device_batch_size": 1,
    }
    script["main"](["train", str(mt.BASE), *(f"{k}={v}" for k, v in options.items())])

    params = script["nnx"].filter_state(last["state"], script["is_param"])
    outer = region.sync.outer_params(region.state, params)
    results = {"params": mt.numbers(params), "outer": mt.numbers(outer)}
    facts = {
        "losses": losses,
        "programs": last["step_fn"]._cache_size(),
        "step": int(last["state"].optimizer.step.get_value()),
        "bytes_sent": region.state.bytes_sent,
    }
    save(folder / f"launcher{index}", results, facts)


def versions() -> dict:
    """Return the versions of what ran."""
    from importlib import metadata

    names = ("maxtext", "jax", "flax", "optax", "orbax-checkpoint", "cocodc_jax")
    return {name: metadata.version(name) for name in names}


def save(folder: Path, results: dict, facts: dict) -> None:
    """Write parameters by run, and facts."""
    folder.mkdir(parents=True)
    for run, params in results.items():
        np.savez(folder / f"{run}.npz", **params)
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    what, path, *rest = sys.argv[1:]
    runs = {
        "alone": alone,
        "stacked": stacked,
        "region": region,
        "launcher": launcher,
    }
    runs[what](Path(path), *map(int, rest))
