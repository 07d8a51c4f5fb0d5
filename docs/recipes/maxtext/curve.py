"""Draw the losses of regions: `curve.py METRICS_FILE...`, into `curve.png`.

Each file is one region's `metrics_file=` of MaxText. It needs Matplotlib.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

figure = Figure(figsize=(7, 4), layout="constrained")
axes = figure.subplots()
for name in sys.argv[1:]:
    rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
    losses = [row["learning/loss"] for row in rows]
    axes.plot([row["step"] for row in rows], losses, label=Path(name).stem)
    print(f"{name}: loss {losses[0]:.3f}, at step {rows[-1]['step']} {losses[-1]:.3f}")
axes.set(xlabel="step", ylabel="loss")
axes.legend()
figure.savefig("curve.png", dpi=160)
