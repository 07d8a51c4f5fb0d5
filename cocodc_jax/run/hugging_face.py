"""Start runs from a Hugging Face LLaMA, and export runs to that format."""

import dataclasses
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

import jax

from cocodc_jax import models
from cocodc_jax.buckets import is_in_bucket
from cocodc_jax.data.tokenizers import Tokenizer, round_up
from cocodc_jax.files import ensure_folder, read_table
from cocodc_jax.paths import expanded
from cocodc_jax.run.bucket import folder_here
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.run.resume import CHECKPOINTS, CONFIG_FILE, only_writer
from cocodc_jax.train.checkpoint import Checkpoints, steps_in
from cocodc_jax.transforms.layers import named_leaves

if TYPE_CHECKING:
    from cocodc_jax.run.session import Session

PARAMS = ("outer", "mean")


def model_of(config: TrainConfig, tokenizer: Tokenizer) -> models.TransformerConfig:
    """Return a run's model with its vocabulary, checked against `init_from`."""
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    folder = config.run.init_from
    if not folder:
        return model
    try:
        published = models.hugging_face.read_config(folder)

        rows = published["vocab_size"]
        if rows < tokenizer.num_tokens:
            raise ValueError(
                f"vocab_size is {rows} there, and tokenizer={config.data.tokenizer!r} "
                f"has {tokenizer.num_tokens} tokens; use the model's own tokenizer"
            )

        # One id, or several ids that end a turn or a text.
        ends = published.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        if ends != [None] and tokenizer.eos_id not in ends:
            raise ValueError(
                f"eos_token_id is {', '.join(map(str, ends))} there, and tokenizer="
                f"{config.data.tokenizer!r} ends a text with {tokenizer.eos_id}; use "
                "the model's own tokenizer"
            )

        vocab_size = max(model.vocab_size, round_up(rows))
        model = dataclasses.replace(model, vocab_size=vocab_size)
        models.hugging_face.check(folder, model)
    except ValueError as error:
        raise ValueError(f"init_from={folder!r}: {error}") from error
    return model


def export(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    step: int | None = None,
    params: str = "outer",
    adapter: bool = False,
) -> dict[str, Any]:
    """Write a run's parameters as a folder that `LlamaForCausalLM` loads.

    It holds the outer parameters, or the mean of the regions', as safetensors in
    float32, with `config.json` and the files of the run's tokenizer. Adapters
    (`lora_rank`) are merged. The folder appears when it is complete.

    Args:
      workdir: of the run, which must not be running.
      out: the folder; missing or empty.
      step: of the checkpoint; None is the newest.
      params: "outer" or "mean".
      adapter: write the adapters alone, as `peft` loads them onto the run's base model.

    Returns:
      Step, parameters, and the names of the files.

    Raises:
      ValueError: naming the argument, its value and a value that works.
      OSError: if the folder cannot be written, or no checkpoint can be read.
    """
    from cocodc_jax.run.preparing import prepare

    for name, folder in (("workdir", workdir), ("out", out)):
        if is_in_bucket(folder):
            raise ValueError(f"{name}={str(folder)!r} is in a bucket; name a folder")
    workdir = folder_here(workdir)
    out = expanded(os.fspath(out), f"out={os.fspath(out)!r}")
    if params not in PARAMS:
        raise ValueError(f"params={params!r} is unknown; use one of {PARAMS}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={str(out)!r} is not empty; name another folder")

    config = _config_of(workdir)
    models.hugging_face.check_llama(config.model)
    if adapter and not config.model.lora_rank:
        raise ValueError(
            "adapter=True asks for the adapters of a run that has none (lora_rank=0); "
            "leave it out"
        )
    if not steps_in(workdir / CHECKPOINTS):
        raise ValueError(f"workdir={str(workdir)!r} has no checkpoints")
    try:
        ensure_folder(out.parent)
    except OSError as error:
        raise OSError(f"out={str(out)!r} cannot be made: {error}") from error

    session = prepare(config, workdir)
    program = session.program
    with (
        only_writer(workdir),
        Checkpoints(workdir / CHECKPOINTS, config.run.keep_checkpoints) as saved,
    ):
        restored = saved.restore(program, step)
    assert restored is not None  # There are checkpoints.
    state, _ = restored
    take = program.outer_params if params == "outer" else program.mean_params
    arrays = jax.device_get(take(state))

    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".exporting-") as parent:
        folder = pathlib.Path(parent, "complete")
        if adapter:
            models.hugging_face.write_adapter(
                folder, session.model, arrays, config.run.init_from
            )
        else:
            _write_model(folder, session, arrays)
        names = sorted(path.name for path in folder.iterdir())
        folder.rename(out)  # Onto an empty folder, too.

    num_params = sum(
        x.size
        for path, x in named_leaves(arrays)
        if models.lora.is_adapter(path) == adapter
    )
    return {"step": state.step, "parameters": num_params, "files": names}


def _config_of(workdir: pathlib.Path) -> TrainConfig:
    """Return the configuration of a run that can be exported."""
    # Elastic regions have one each.
    paths = [folder / CONFIG_FILE for folder in (workdir, workdir / "region_0")]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise ValueError(f"workdir={str(workdir)!r} has no {CONFIG_FILE} of a run")

    try:
        config = TrainConfig.from_json(read_table(paths[0]))
        if config.run.exchange == "elastic":
            raise ValueError("exchange='elastic' cannot be exported")
    except ValueError as error:
        raise ValueError(f"workdir={str(workdir)!r} has a run: {error}") from error
    return config


def _write_model(
    folder: pathlib.Path, session: "Session", params: models.Params
) -> None:
    """Write a model with its tokenizer."""
    tokenizer = session.text.tokenizer
    models.hugging_face.write(
        folder,
        session.model,
        params,
        max_length=session.config.data.sequence_length,
        eos_id=tokenizer.eos_id,
    )
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
