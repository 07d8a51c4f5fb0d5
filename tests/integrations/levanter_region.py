"""One region of Levanter's own trainer, by the documentation's launcher.

    python tests/integrations/levanter_region.py FOLDER INDEX REGIONS RUN STEPS...

A child of `test_stacked_trainers.py`. Trains to each of the steps, and starts again
from its own checkpoint after each. It leaves parameters in `FOLDER/RUN_INDEX.npz`, and
losses of the last training in `FOLDER/RUN_INDEX.json`.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import levanter_job as job
import numpy as np
import stacked_runs

LAUNCHER = Path(__file__).parents[2] / "docs" / "recipes" / "levanter" / "train.py"


def run(folder: Path, index: int, regions: int, name: str, stops: list[int]) -> None:
    """Train a region, by Streaming DiLoCo with the settings of the plain loop."""
    places = {
        "REGION": f"{index}",
        "REGIONS": f"{regions}",
        "KEY": f"{folder / 'key'}",
    }
    os.environ.update(places)
    launcher = runpy.run_path(str(LAUNCHER), run_name="launcher")

    class Trainer(launcher["RegionTrainer"]):
        method = stacked_runs.streaming()

    for stop in stops:
        os.environ["VIA"] = f"{folder / f'via_{name}_{stop}'}"
        model, _, losses = job.train(
            stacked_runs.ADAM,
            None,
            stop,
            folder / f"run_{name}_{index}",
            make_trainer=Trainer,
            regions=(index,),
        )

    np.savez(folder / f"{name}_{index}.npz", **stacked_runs.numbers(model))
    (folder / f"{name}_{index}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    folder, index, regions, name, *stops = sys.argv[1:]
    run(Path(folder), int(index), int(regions), name, [int(stop) for stop in stops])
