"""`experiments.export`, and runs that start from its files."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from cocodc_jax.models import hugging_face, init_params
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.run.hugging_face import model_of
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.session import CHECKPOINTS
from cocodc_jax.train.checkpoint import Checkpoints
from experiments import export, train

CONFIG = PRESETS["smoke"].replace(
    method="streaming_diloco",
    sync_interval=4,
    num_fragments=2,
    delay_steps=1,
    steps=8,
    warmup_steps=1,
    regions=2,
    eval_batches=2,
    num_layers=2,
    width=16,
    mlp_width=16,
    tokenizer="bpe:270",
)
FLAGS = ["--preset=smoke", "--num_layers=2", "--width=64", "--mlp_width=16"]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run's folder with two checkpoints, as if it had trained, and its data."""
    workdir = tmp_path_factory.mktemp("trained")
    dataset, data_dir = (word.partition("=")[2] for word in corpus)
    session = prepare(CONFIG.replace(dataset=dataset, data_dir=data_dir), workdir)
    program = session.program
    state = program.init(session.init_params(jax.random.key(0)), jax.random.key(1))
    apart = jax.tree.map(lambda x: 2 * x, state.region.params)

    with Checkpoints(workdir / CHECKPOINTS) as saved:
        for step in (4, 8):
            region = state.region._replace(params=apart)
            state = dataclasses.replace(state, region=region, step=step)
            saved.save(program, state, {})

    return workdir, corpus


def restored(workdir, step):
    config = TrainConfig.from_json(json.loads((workdir / "config.json").read_text()))
    session = prepare(config, workdir)
    with Checkpoints(workdir / CHECKPOINTS) as saved:
        state, _ = saved.restore(session.program, step)
    return session, state


def equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, jax.device_get(expected))


def test_the_outer_parameters_are_written_and_begin_another_run(
    trained, tmp_path, call, refused
):
    workdir, data = trained
    out = tmp_path / "made" / "out"
    printed, _ = call(export, f"--workdir={workdir}", f"--out={out}")
    tensors = load_file(out / "model.safetensors")
    assert json.loads(printed) == {
        "step": 8,
        "parameters": sum(map(np.size, tensors.values())),
        "files": [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ],
    }

    session, state = restored(workdir, 8)
    equal(hugging_face.read(out, session.model), session.program.outer_params(state))
    written = json.loads((out / "config.json").read_text())
    assert written["eos_token_id"] == session.text.tokenizer.eos_id
    assert written["max_position_embeddings"] == 32

    mean = tmp_path / "mean"
    call(export, f"--workdir={workdir}", f"--out={mean}", "--step=4", "--params=mean")
    session, state = restored(workdir, 4)
    equal(hugging_face.read(mean, session.model), session.program.mean_params(state))

    config = session.config.replace(init_from=str(out), tokenizer=f"hf:{out}")
    again = prepare(config, tmp_path / "again")
    equal(again.init_params(jax.random.key(1)), hugging_face.read(out, again.model))
    assert again.model == session.model

    begun = [f"--tokenizer=hf:{out}", f"--init_from={out}", f"--workdir={tmp_path}/run"]
    error = refused(train, *FLAGS, *data, *begun)
    assert error.startswith(f"--init_from='{out}': {out}/config.json is of")
    assert "width is 16 there and 64 here; give --width=16" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out={tmp}/new --step=3", "--step=3 has no checkpoint in .* steps 4, 8"),
        ("--out={tmp}/new --params=best", "--params='best' is unknown"),
        ("--out={run}", "--out='.*' is not empty; name another"),
        ("--workdir={tmp} --out={tmp}/new", "--workdir='.*' has no config.json"),
        ("", "--out=None is no folder"),
        ("--workdir={tmp} --out=gs://x/y", "--out='gs://x/y' is in a bucket; name a"),
        ("--workdir=gs://x/y --out={tmp}/new", "--workdir='gs://x/y' is in a bucket"),
        (
            "--out={tmp}/none --adapter",
            ".*adapter=True asks for the adapters of a run that has none",
        ),
    ],
)
def test_wrong_flags_are_refused_in_a_line(trained, tmp_path, refused, words, message):
    words = words.format(tmp=tmp_path, run=trained[0]).split()
    error = refused(export, f"--workdir={trained[0]}", *words)
    assert re.match(message, error), error
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_created_is_named_before_the_work(
    trained, tmp_path, refused
):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    error = refused(export, f"--workdir={trained[0]}", f"--out={out}", code=1)
    assert error.startswith(f"out='{out}' cannot be made: ")


def test_a_run_outlives_the_one_that_it_went_on_from(trained, tmp_path, call, refused):
    """Neither going on nor exporting asks for it once there is a checkpoint."""
    workdir = tmp_path / "run"
    shutil.copytree(trained[0], workdir)
    config = json.loads((workdir / "config.json").read_text())
    config["run"]["adopt_from"] = str(tmp_path / "moved")
    (workdir / "config.json").write_text(json.dumps(config))
    assert prepare(TrainConfig.from_json(config), workdir).workdir == workdir
    call(export, f"--workdir={workdir}", f"--out={tmp_path / 'out'}")
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)

    with pytest.raises(ValueError, match="adopt_from='.*/moved' holds no run"):
        prepare(TrainConfig.from_json(config), workdir)
    error = refused(export, f"--workdir={workdir}", f"--out={tmp_path / 'new'}")
    assert error == f"--workdir='{workdir}' has no checkpoints"


def test_a_folder_and_a_tokenizer_that_disagree_are_refused(tmp_path):
    config = PRESETS["smoke"]

    class Tokens:
        vocab_size = 304
        num_tokens = 300
        eos_id = 299

    model = config.model
    hugging_face.write(tmp_path, model, init_params(model, jax.random.key(0)), eos_id=5)
    config = config.replace(init_from=str(tmp_path))

    with pytest.raises(
        ValueError, match="vocab_size is 272 there, and tokenizer=.* 300"
    ):
        model_of(config, Tokens())

    Tokens.num_tokens = 272
    with pytest.raises(
        ValueError, match="eos_token_id is 5 there, and tokenizer=.* 299"
    ):
        model_of(config, Tokens())

    Tokens.eos_id = 5
    assert model_of(config, Tokens()).vocab_size == 304
    Tokens.vocab_size = 16
    Tokens.num_tokens = 9
    assert model_of(config, Tokens()).vocab_size == 272


@pytest.mark.slow
def test_adapters_are_trained_sent_and_written_alone(trained, tmp_path, call):
    """A run trains adapters of an exported model, written merged and alone."""
    workdir, (dataset, data_dir) = trained
    base = tmp_path / "base"
    run = tmp_path / "run"
    call(export, f"--workdir={workdir}", f"--out={base}")
    flags = dict(
        preset="smoke",
        num_layers=2,
        width=16,
        mlp_width=16,
        regions=2,
        steps=8,
        eval_batches=2,
        warmup_steps=1,
        method="diloco",
        sync_interval=4,
        inner_lr=0.01,
        tokenizer=f"hf:{base}",
        init_from=base,
        lora_rank=2,
        workdir=run,
    )
    words = [f"--{name}={value}" for name, value in flags.items()]
    call(train, *words, dataset, data_dir)

    outs = {}
    for name in ("merged", "adapter"):
        out = tmp_path / name
        words = [f"--workdir={run}", f"--out={out}", f"--adapter={name == 'adapter'}"]
        printed, _ = call(export, *words)
        outs[name] = json.loads(printed)

    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    num_trained = sum(map(np.size, adapter.values()))
    assert outs["adapter"]["parameters"] == num_trained
    assert outs["adapter"]["files"] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]

    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)

    # Two syncs of the adapters alone.
    summary = json.loads((run / "summary.json").read_text())
    assert summary["bytes_sent_per_region"] == 2 * 4 * num_trained

    tensors = load_file(base / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert tensors.keys() == merged.keys()

    changed = {n for n in tensors if not np.array_equal(tensors[n], merged[n])}
    assert changed == {n for n in tensors if "_proj" in n}
