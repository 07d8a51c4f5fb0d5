"""Tokens per second of MaxText with two regions in one program, by method.

    ../envs/maxtext/bin/python -m tests.integrations.maxtext_speed FOLDER [ROUNDS]

Run it in MaxText's environment, from the checkout, on a machine with nothing else to
do. Every variant trains the same batches by MaxText's own jitted step, over its mesh
axis `diloco`. Rounds of the variants are interleaved, so that a drift of the machine is
in all of them, and a table has the median of the rounds. A round is three intervals of
H steps, and ends with a sync. There is a table for each size of batch: an event costs
the same in both, and a step does not.
"""

import statistics
import sys
import time
from pathlib import Path

import jax

INTERVAL = 8
STEPS = 24
REGION_BATCHES = (4, 16)
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
    """A MaxText job with one of the methods, or without one, after its step."""

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


def rates_of(
    variants: dict[str, Variant], region_batch: int, rounds: int
) -> dict[str, list[float]]:
    """Return the tokens per second of each variant, of all rounds."""
    from tests.integrations import maxtext_job as mt
    from tests.integrations import maxtext_runs as runs

    mt.LENGTH = SIZES["max_target_length"]
    mt.REGION_BATCH = region_batch
    batches = [
        mt.stacked([mt.batch_of(step, r) for r in range(runs.NUM_REGIONS)])
        for step in range(STEPS)
    ]
    tokens = STEPS * batches[0]["inputs"].size

    rates: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(1 + rounds):
        for name, variant in variants.items():
            seconds = variant.seconds(batches)
            if number:  # The first round compiles.
                rates[name].append(tokens / seconds)
    return rates


def main(folder: Path, rounds: int) -> None:
    """Print the tables."""
    variants = {name: Variant(folder, *of) for name, of in VARIANTS.items()}
    for region_batch in REGION_BATCHES:
        rates = rates_of(variants, region_batch, rounds)
        fastest = statistics.median(rates["without syncs"])

        print(f"\nExamples of a region in a step: {region_batch}\n")
        print("| | tokens/s | of no syncs | rounds, tokens/s |")
        print("| --- | --- | --- | --- |")
        for name, of_rounds in rates.items():
            rate = statistics.median(of_rounds)
            row = f"{min(of_rounds):,.0f} to {max(of_rounds):,.0f}"
            print(f"| {name} | {rate:,.0f} | {rate / fastest:.3f} | {row} |")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    path, *rest = sys.argv[1:]
    main(Path(path), *(map(int, rest) if rest else (5,)))
