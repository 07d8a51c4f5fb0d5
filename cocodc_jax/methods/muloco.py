r"""`muloco` (arXiv 2505.23725): DiLoCo around Muon, 2-bit messages, error feedback.

The inner optimizer is Muon. For each matrix W of the blocks, of gradient G, with
$B = U S V^\top$ its momentum's singular value decomposition and w the weight decay:

$$
\begin{align*}
B &\leftarrow b B + G \\
W &\leftarrow W - \gamma \, \Big(\sqrt{d_{\mathrm{out}} / d_{\mathrm{in}}} \;
U V^\top + w W\Big)
\end{align*}
$$

$U V^\top$ is approximated by Newton-Schulz iterations, a layer at a time. Every H
steps, blocking, each region m sends its pseudo-gradient in 2 bits a value, with error
feedback $e^m$ from zero, and the outer Nesterov optimizer steps on the mean:

$$
\begin{align*}
e^m &\leftarrow \beta e^m + \theta^g - \theta^m \\
q^m &= \mathrm{stat2}(e^m), \qquad e^m \leftarrow e^m - q^m \\
\Delta &= \frac{1}{M} \sum_m q^m, \qquad v \leftarrow \mu v + \Delta \\
\theta^g &\leftarrow \theta^g - \eta \, (\Delta + \mu v), \qquad
\theta^m \leftarrow \theta^g
\end{align*}
$$

Embedding, head, norms and other vectors take AdamW with b2 0.99 (`transforms.muon`).
Norm scales are sent in full (`matrices`). stat2 sends the means of four bins
(`transforms.statistical`). To separate Muon's share from the rest:

    python -m experiments.compare --methods=muloco,diloco,diloco+muon,data_parallel+muon

Source: MuLoCo, arXiv 2505.23725; update and numbers read from the authors' code.
Differs from the paper's code: the coefficients of Newton-Schulz, see `transforms.muon`;
without `--beta2` Adam's b2 is 0.99, unless the preset has another; a scanned stack of
layers is one tensor for the 2-bit code's mean and spread.
Defaults: published H 30, b 0.9 without Nesterov, beta 0.9, eta 0.9 and mu 0.8 with 8
regions (0.6 and 0.7 with one; 0.7 and 0.6 in a later version); here H 30, b 0.9, beta
0.9, eta 0.9, mu 0.8.
Measured here: docs/results/methods.md, all at AdamW's learning rate of 2e-3, which is
little for this Muon.
"""

import dataclasses

from cocodc_jax.methods.diloco import diloco
from cocodc_jax.sync import Compressed, Inner, Method
from cocodc_jax.transforms import compression


def muloco(
    sync_interval: int = 30,
    outer_lr: float = 0.9,
    outer_momentum: float = 0.8,
    compress: str = "ef:0.9+matrices+stat2",
) -> Method:
    """Build MuLoCo (arXiv 2505.23725): DiLoCo around Muon, 2-bit messages.

    Args:
      sync_interval: H, inner steps between syncs.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      compress: the compressor with its error feedback.
    """
    method = diloco(sync_interval, outer_lr, outer_momentum)
    method = method.with_sync(message=Compressed(compression.parse(compress)))
    return dataclasses.replace(method, name="muloco", inner=Inner("muon"))
