r"""`gpa` (arXiv 2512.17131): one region whose iterates are averaged at every step.

There is one region, M = 1. Generalized primal averaging does smoothly what DiLoCo with
one region does in two loops (`snoo`). The inner optimizer steps from y, and two further
sequences follow, which begin at the initial parameters:

$$
\begin{align*}
\theta &= \mathrm{inner}(y, g(y)), \qquad \Delta = y - \theta \\
z &\leftarrow z - \Delta \\
x &\leftarrow \mu_x x + (1 - \mu_x) \, z \\
y &\leftarrow \mu_y x + (1 - \mu_y) \, z
\end{align*}
$$

z is the inner optimizer's sequence, x its average, which is evaluated, and y the point
of the next gradient. The method is a sync after every step, whose outer parameters are
x (`eval_loss_outer`), whose outer optimizer keeps z - x (`transforms.primal_average`),
and from which the region continues at y (`eval_loss`).

Nothing is sent, so `compress` has no meaning. As in every method with syncs, x and z
are in float32 in the host's memory; on an accelerator `outer_placement="divided"` keeps
them there.

Source: Defazio, Mishchenko, Raman, Shi and Xiao, arXiv 2512.17131; equations and
defaults read from the authors' code (facebookresearch/optimizers, `gpa`), the paper's
own text was not available.
Derived here: with mu_x = 0 it is the inner optimizer alone, for any mu_y (the authors'
limit). With mu_x = mu_y = mu, y is `snoo` at H = 1, eta = 1 - mu and the same mu; with
SGD inside that is Nesterov's momentum with the learning rate times 1 - mu.
Differs from the paper: weight decay acts at y, as in the first version of the authors'
code; a later one lets it act at z. Their code also has schedule-free averaging, which
is `optax.contrib.schedule_free` as the inner optimizer.
Defaults: published mu_x 0.9967 and mu_y 0.7, the same here. mu_x = 0.9^(1/H) does what
`snoo` does with H steps between outer ones (the authors' table: 0.9869 for 8, 0.9934
for 16, 0.9967 for 32, 0.9984 for 64). x is an average over about 1 / (1 - mu_x) steps,
300 by default: lower mu_x in shorter runs.
Measured here: docs/results/claims.md; it takes one region and is left out of the
comparison of all methods in four.
"""

from cocodc_jax.sync import Method, SharedOuter, Sync, merge, schedules
from cocodc_jax.transforms.primal_average import primal_average, primal_start


def gpa(eval_interpolation: float = 0.9967, train_interpolation: float = 0.7) -> Method:
    """Build GPA (arXiv 2512.17131): an average of one region's iterates, every step.

    Args:
      eval_interpolation: mu_x, weight of the average in the new one, in [0, 1); 0
        leaves the inner optimizer as it is.
      train_interpolation: mu_y, weight of the average where gradients are taken, in
        [0, 1]; the rest is the inner optimizer's own sequence.
    """
    outer = SharedOuter(
        optimizer=primal_average(eval_interpolation),
        start=primal_start(train_interpolation),
    )
    sync = Sync(
        schedule=schedules.staggered(sync_interval=1),
        outer=outer,
        merge=merge.replace(),
    )
    return Method(name="gpa", sync=sync, num_regions=1)
