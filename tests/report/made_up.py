"""Made-up runs: the losses of four methods over seeds, with plausible syncs."""

import math

from cocodc_jax.report.comparison import Run

NUM_PARAMETERS = 1_000_000


def run(method, seed=0, end=1.5, steps=300, interval=30, delay=5, num_fragments=4):
    records = []
    sent = 0

    for step in range(1, steps + 1):
        if method == "data_parallel":
            sent += 4 * NUM_PARAMETERS
        elif step % interval == 0 and method == "diloco":
            sent += 4 * NUM_PARAMETERS
            records.append(sync(step, 0, step, step, 4 * NUM_PARAMETERS))
        elif method not in ("diloco", "data_parallel"):
            slot, rest = divmod(step - delay, interval // num_fragments)
            if rest == 0 and slot > 0:
                sent += NUM_PARAMETERS
                fragment = slot % num_fragments
                records.append(sync(step, fragment, step - delay, step, NUM_PARAMETERS))

        if step % 30 == 0 or step == 1:
            loss = end + 4.0 * math.exp(-step / 50) + 0.01 * seed
            records.append(evaluation(step, loss, sent))

    return Run(method, seed, records, summary(method, seed, records))


def sync(step, fragment, start, apply, size):
    return {
        "kind": "sync",
        "step": step,
        "fragment": fragment,
        "start_step": start,
        "apply_step": apply,
        "bytes": size,
        "pseudo_gradient_norm": 0.5,
        "correction_ratio": None,
    }


def evaluation(step, loss, sent):
    return {
        "kind": "eval",
        "step": step,
        "tokens": 4096 * step,
        "bytes_sent_per_region": sent,
        "eval_loss": loss,
        "eval_perplexity": math.exp(loss),
        "eval_loss_outer": loss + 0.02,
        "region_drift": 0.01,
    }


def summary(method, seed, records):
    last = [record for record in records if record["kind"] == "eval"][-1]
    return last | {
        "method": method,
        "preset": "tiny",
        "seed": seed,
        "regions": 4,
        "parameters": NUM_PARAMETERS,
        "steps": last["step"],
        "outer_bytes": 1e6,
        "seconds": 60.0,
        "stall_seconds": 1.5,
        "exposed_share": None if method == "data_parallel" else 0.025,
        "goodput": 0.75,
        "tokens_per_second": 20_000.0,
        "correction_ratio": 0.2 if method == "cocodc" else None,
    }
