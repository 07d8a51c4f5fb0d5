"""Exports a run's model for Hugging Face's transformers.

    python -m experiments.export --workdir=RUN --out=DIR

Writes model.safetensors and config.json of a LlamaForCausalLM in float32, and the files
of the run's tokenizer. `AutoModelForCausalLM.from_pretrained(DIR)` loads the model, and
`--init_from=DIR` starts another run from it. Adapters of `--lora_rank` are merged;
`--adapter` writes only the adapters, for `peft` to load onto the base model. The run's
data must still be in their place. Runs of elastic regions cannot be exported. Needs
`pip install 'cocodc_jax[hf]'`.
"""

import pathlib
import sys

from cocodc_jax.run.config import flags
from cocodc_jax.run.config.train_config import dumps
from cocodc_jax.run.hugging_face import PARAMS, export

from . import program


def main() -> None:
    """Read the flags, write the folder, print what is in it."""
    with flags.usage_errors():
        for name in ("workdir", "out"):
            if not flags.value(name):
                raise ValueError(f"{name}={flags.value(name)} is no folder; name one")
        try:
            written = export(
                workdir=flags.value("workdir"),
                out=flags.value("out"),
                step=flags.value("step"),
                params=flags.value("params"),
                adapter=flags.value("adapter"),
            )
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    print(dumps(written), end="")


def define() -> None:
    """Define the program's flags."""
    program.define(
        ("workdir", pathlib.Path, "Folder of the run."),
        ("out", pathlib.Path, "Folder to write; missing or empty."),
        ("step", int, "Step of the checkpoint. Default: the newest."),
        (
            "params",
            "outer",
            f"Which parameters, {' or '.join(PARAMS)}: of the outer model, or the mean "
            "of the regions'.",
        ),
        ("adapter", False, "Whether to write the adapters alone, for peft."),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
