"""The models in float64 NumPy, from the formulas, by no code of the package."""

import jax
import numpy as np


def unstacked(config, params):
    """Parameters with each layer by itself."""
    if not config.scan_layers:
        return params
    blocks = {
        layer: jax.tree.map(lambda leaf, i=layer: leaf[i], params["blocks"])
        for layer in range(config.num_layers)
    }
    return params | {"blocks": blocks}


def silu(x):
    return x / (1 + np.exp(-x))


def mixture(x, router, weights, per_token):
    """The definition, token by token: `weights` are gate, up and down of experts."""
    chances = np.exp(x @ router)
    chances /= chances.sum(-1, keepdims=True)

    out = np.zeros_like(x)
    for t, token in enumerate(x):
        best = np.argsort(-chances[t], kind="stable")[:per_token]
        for e in best:
            gate, up, down = (w[e] for w in weights)
            hidden = silu(token @ gate) * (token @ up)
            out[t] += chances[t, e] / chances[t, best].sum() * (hidden @ down)

    return out


def logits(config, params, tokens):
    """The forward pass, one sequence, head and position at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    params = unstacked(config, params)
    width = config.width // config.num_heads
    group = config.num_heads // config.num_kv_heads

    def norm(x, scale):
        mean_square = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + config.norm_epsilon) * scale["scale"]

    def turn(head):
        turned = np.empty_like(head)
        for t, vector in enumerate(head):
            for i in range(width // 2):
                angle = t * config.rope_theta ** (-2 * i / width)
                spin = np.exp(1j * angle) * (vector[i] + 1j * vector[i + width // 2])
                turned[t, i] = spin.real
                turned[t, i + width // 2] = spin.imag
        return turned

    def head_of(x, kernel, index, scale=None):
        head = x @ kernel[:, index * width : (index + 1) * width]
        return head if scale is None else norm(head, scale)

    def attend(x, block):
        mixed = []
        for h in range(config.num_heads):
            query = turn(head_of(x, block["query"], h, block.get("query_norm")))
            key = turn(head_of(x, block["key"], h // group, block.get("key_norm")))
            value = head_of(x, block["value"], h // group)

            rows = []
            for t in range(len(x)):
                weight = np.exp(key[: t + 1] @ query[t] / np.sqrt(width))
                rows.append(weight @ value[: t + 1] / weight.sum())
            mixed.append(np.stack(rows))

        return np.concatenate(mixed, axis=-1) @ block["output"]

    def feed(x, block):
        if "moe" in block:
            weights = [block["moe"]["experts"][name] for name in ("gate", "up", "down")]
            return mixture(x, block["moe"]["router"], weights, config.experts_per_token)
        mlp = block["mlp"]
        return (silu(x @ mlp["gate"]) * (x @ mlp["up"])) @ mlp["down"]

    logits = []
    for sequence in tokens:
        x = params["embedding"][sequence]
        for layer in range(config.num_layers):
            block = params["blocks"][layer]
            x = x + attend(norm(x, block["attention_norm"]), block["attention"])
            x = x + feed(norm(x, block["mlp_norm"]), block)

        head = params["embedding"].T if config.tie_embeddings else params["head"]
        logits.append(norm(x, params["norm"]) @ head)
    return np.stack(logits)
