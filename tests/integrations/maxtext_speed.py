"""Tokens per second of MaxText with two regions in one program, by method.

    ../envs/maxtext/bin/python -m tests.integrations.maxtext_speed FOLDER [ROUNDS]

Run it in MaxText's environment, from the checkout, on a machine with nothing else to
do. Every variant trains the same batches by MaxText's own jitted step, over its mesh
axis `diloco`. Rounds of the variants are interleaved, so that a drift of the machine is
in all of them, and the table has the median of the rounds. A round is three intervals
of H steps, and ends with a sync.
"""

import statistics
import sys
import time
from pathlib import Path

import jax

INTERVAL, STEPS = 8, 24
SIZES = {
    "base_emb_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 32,
    "base_mlp_dim": 512,
    "max_target_length": 128,
}
OVERLAPPED = {"sync_interval": INTERVAL, "num_fragments": 2, "delay_steps": 2}
# Name, MaxText's own period, and the method after its step.
VARIANTS = {
    "without syncs": (10**6, None, {}),
    "MaxText's own DiLoCo": (INTERVAL, None, {}),
    "`diloco`": (10**6, "diloco", {"sync_interval": INTERVAL}),
    "`streaming_diloco`": (10**6, "streaming_diloco", OVERLAPPED),
    "`cocodc`": (10**6, "cocodc", OVERLAPPED),
    "`streaming_diloco`, one bit": (
        10**6,
        "streaming_diloco",
        OVERLAPPED | {"compress": "ef+sign"},
    ),
}


class Variant:
    """A MaxText job with one of the methods, or none, after its step."""

    def __init__(self, folder: Path, period: int, name: str | None, options: dict):
        import cocodc_jax as cc
        from tests.integrations import maxtext_job as mt
        from tests.integrations import maxtext_runs as runs

        settings = runs.STACKED | runs.ADAM | SIZES
        settings["diloco_sync_period"] = period
        self.job = mt.Job(folder, **settings)
        self.sync = self.state = None
        if name is not None:
            method = cc.methods.get(name, **options)
            self.sync = cc.RegionSync(method, self.job.params, runs.NUM_REGIONS)
            self.state = self.sync.init(self.job.params)

    def seconds(self, batches: list) -> float:
        """Train on some batches; return the time until all is computed."""
        start = time.perf_counter()
        for batch in batches:
            self.job.step(batch)
            if self.sync is not None:
                self.job.params, self.state = self.sync.after_step(
                    self.job.params, self.state
                )
        jax.block_until_ready(self.job.params)
        return time.perf_counter() - start


def main(folder: Path, rounds: int) -> None:
    """Print the table."""
    from tests.integrations import maxtext_job as mt
    from tests.integrations import maxtext_runs as runs

    mt.LENGTH = SIZES["max_target_length"]
    batches = [
        mt.stacked([mt.batch_of(step, r) for r in range(runs.NUM_REGIONS)])
        for step in range(STEPS)
    ]
    tokens = STEPS * batches[0]["inputs"].size
    variants = {name: Variant(folder, *of) for name, of in VARIANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(1 + rounds):
        for name, variant in variants.items():
            seconds = variant.seconds(batches)
            if number:  # The first round compiles.
                times[name].append(seconds)

    rates = {name: tokens / statistics.median(x) for name, x in times.items()}
    print("| | tokens/s | of no syncs | rounds, tokens/s |")
    print("| --- | --- | --- | --- |")
    for name, rate in rates.items():
        share = rate / rates["without syncs"]
        each = [f"{tokens / x:,.0f}" for x in sorted(times[name], reverse=True)]
        print(f"| {name} | {rate:,.0f} | {share:.3f} | {each[0]} to {each[-1]} |")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    path, *rest = sys.argv[1:]
    main(Path(path), *(map(int, rest) if rest else (5,)))
