"""Hessian-vector approximations, of which delay compensation uses one.

A curvature turns a gradient `g`, taken at stale parameters, and a displacement
`D = params - stale_params` into an approximation of `H D`, so that to first order

    gradient(params) = g + strength * H D.

Units: `g` is either a true gradient ("gradient" units) or a per-step pseudo-gradient
`u`, a difference of parameters ("parameter" units; for SGD `u` is `learning_rate *
gradient`). `H D` must be in the units of `g`. Every factory says which it returns;
those with an argument `units` convert a product `c` in gradient units by

    "gradient"    c                                         for true gradients
    "parameter"   learning_rate * c                         the inner optimizer is SGD
    "adam"        learning_rate * c / (sqrt(second_moment) + 1e-8)          Adam(W)

where `second_moment` is Adam's bias-corrected nu; where all of it is zero, as before
Adam's first step, the product is 0. The last two give parameter units.

| curvature                  | H D                       | gradients   | memory      |
|----------------------------|---------------------------|-------------|-------------|
| `none`                     | 0                         | 0           | 0           |
| `isotropic`                | D / delay_steps           | 0           | 0           |
| `outer_product`            | g * g * D / sync_interval | 0           | 0           |
| `normalized_outer_product` | g * g * D, length of g    | 0           | one tree    |
| `adam_second_moment`       | lr * sqrt(nu) * D         | 0           | 0           |
| `hessian_vector`           | exact                     | 2.5         | activations |
| `gauss_newton`             | J' H_out J D              | 1.6         | activations |
| `hutchinson`               | mean(z * H z) * D         | 0.6 + 1.9 n | activations |

"gradients" is the cost in units of one gradient on the batch that is used (floating
point operations of a compiled four-layer perceptron, n samples), "memory" what is held
beyond `g` and `D`.

Source: DC-ASGD (arXiv 1609.08326, equation 10) for `outer_product`, as read from the
authors' code; CoCoDC (arXiv 2504.17672) for its use on pseudo-gradients and for the
division by the sync interval, read from the authors' code, the place of that division
about 75 % sure; DC-S3GD (arXiv 1911.02516) and CoCoDC's later code for
`normalized_outer_product`; Hutchinson (1990). `isotropic`, `adam_second_moment` and all
changes of units are derived here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.layers import is_stack, path_of
from cocodc_jax.transforms.numerics import (
    cast_like,
    check_at_least,
    check_choice,
    check_count,
    check_not_negative,
    check_positive,
    safe_norm,
    vary_like,
    wide_dtype,
    widen,
)

Units = Literal["parameter", "gradient", "adam"]

_UNIT_NEEDS: dict[str, frozenset[str]] = {
    "gradient": frozenset(),
    "parameter": frozenset({"learning_rate"}),
    "adam": frozenset({"learning_rate", "second_moment"}),
}


@runtime_checkable
class ProductFn(Protocol):
    """The `product` of a `Curvature`."""

    def __call__(self, gradient: Any, displacement: Any, /, **extra: Any) -> Any:
        """Approximate H D.

        Args:
          gradient: g, taken at the stale parameters; a tree with leaves of at least
            float32, old minus new where it is a pseudo-gradient.
          displacement: D, `params - stale_params`, of the same structure and shapes.
          **extra: exactly the arguments that `Curvature.needs` names.

        Returns:
          H D, of the same structure, in the units of the gradient.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Curvature:
    """A Hessian-vector approximation and the arguments that it needs.

    Attributes:
      name: its name in errors and reports.
      product: approximates H D; see `ProductFn`.
      needs: names of the extra arguments. `stale_params` is supplied by
        `delay_compensation`; the caller of `update` passes the rest.
    """

    name: str
    product: Callable[..., Any]
    needs: frozenset[str] = frozenset()


def none() -> Curvature:
    """Take H D = 0, the zeroth order, which replays the local progress unchanged."""
    return Curvature(
        "none", lambda _, displacement: optax.tree.zeros_like(displacement)
    )


def isotropic() -> Curvature:
    """Pull to stale_params: H D = D / delay_steps, in parameter units.

    After a merge `theta_g - delay_steps * g~` a strength of c gives
    `theta_g - c D + progress`: the mix is made at the staged point and the local
    progress is kept whole. Needs `delay_steps` (a count of at least 1), no batch.
    """

    def product(gradient, displacement, *, delay_steps):
        check_count("delay_steps", delay_steps)
        return jax.tree.map(
            lambda d: d / jnp.asarray(delay_steps, d.dtype), displacement
        )

    return Curvature("isotropic", product, frozenset({"delay_steps"}))


def outer_product(sync_interval: int = 1, units: str = "parameter") -> Curvature:
    """Take DC-ASGD's empirical Fisher diagonal: H D = g * g * D / sync_interval.

    With `units="parameter"` the square is taken of `g` as it comes: DC-ASGD's rule
    when `g` is a true gradient, and CoCoDC's published rule when it is a per-step
    pseudo-gradient, where it amounts to nothing (about 4e-9 of `g` at a learning rate
    of 4e-4, 5 steps of delay and an interval of 100).
    With `units="gradient"` the square is taken of `G = g / learning_rate` and
    the product brought back, `learning_rate * G * G * D = g * g * D / learning_rate`;
    it needs `learning_rate`, that of the inner optimizer, and is 0 where that is 0.
    Both return the units of `g`. No batch, no memory.

    Args:
      sync_interval: the divisor H of CoCoDC in steps; 1 for DC-ASGD.
      units: units in which `g` is squared, "parameter" or "gradient".
    """
    check_count("sync_interval", sync_interval)
    check_choice("units", units, ("parameter", "gradient"))

    def product(gradient, displacement, learning_rate=1.0):
        divisor = learning_rate * sync_interval
        if units == "gradient":  # Schedules end at 0, where there is no G to square.
            divisor = jnp.where(divisor > 0, divisor, jnp.inf)
        square = lambda g, d: g * g * d / jnp.asarray(divisor, d.dtype)  # noqa: E731
        return jax.tree.map(square, gradient, displacement)

    needs = frozenset({"learning_rate"} if units == "gradient" else ())
    return Curvature("outer_product", product, needs)


def normalized_outer_product(
    max_weight: float | None = None,
    scope: str = "tensor",
    eps: float = 1e-8,
    has_layers: Callable[[str], bool] = is_stack,
) -> Curvature:
    """Take H D = w g * g * D with w such that it is as long as g (DC-S3GD).

        c = g * g * D
        w = min(||g|| / (||c|| + eps), max_weight)

    Where `||c||` is well above `eps` the correction is `strength` times the length of
    `g`, and does not fade as `D` goes to zero unless `max_weight` caps it, which is the
    CoCoDC authors' own later remedy. With per-step pseudo-gradients it is not: with
    values of 2e-4 and displacements of 1e-3 `||c||` is 3e-10 for 64 values and 1e-8 for
    100,000, so that small tensors are hardly corrected; a smaller `eps` mends that.

    Weights multiply: the cap lambda_max of their code is `strength * max_weight`, in
    the units of 1 / (g * D). Their uncapped form (November 2025, strength 1; DC-S3GD
    has 0.2) divides `c` by the learning rate and uses `g` undivided: equal, with `eps =
    1e-8 * learning_rate / delay_steps ** 2`. Both were read from that code. No batch;
    holds one tree.

    Args:
      max_weight: largest `w`, or None for no cap.
      scope: "tensor" takes norms and weight per leaf, "layer" also per layer of a leaf
        that stacks them (`layers.is_stack`), "tree" over all leaves at once.
      eps: at least 0, keeps `w` finite; in the units of `c`, 1e-8 as in the authors'
        code. `w` is 0 where `||c|| + eps` is.
      has_layers: `has_layers(path) -> bool`, whether a leaf's first axis is of layers,
        for scope "layer"; by default a guess by its name.
    """
    if max_weight is not None:
        check_positive("max_weight", max_weight)
    check_not_negative("eps", eps)
    check_choice("scope", scope, ("tensor", "layer", "tree"))

    def normalized(gradient, displacement):
        curved = jax.tree.map(lambda g, d: g * g * d, gradient, displacement)
        length = safe_norm(curved) + eps
        weight = safe_norm(gradient) / jnp.where(length > 0, length, jnp.inf)
        if max_weight is not None:
            weight = jnp.minimum(weight, max_weight)
        return jax.tree.map(lambda c: weight.astype(c.dtype) * c, curved)

    def of_layers(keys, gradient, displacement):
        is_stacked = gradient.ndim and has_layers(path_of(keys))
        of_leaf = jax.vmap(normalized) if is_stacked else normalized
        return of_leaf(gradient, displacement)

    def product(gradient, displacement):
        if scope == "tree":
            return normalized(gradient, displacement)
        if scope == "layer":
            return jax.tree_util.tree_map_with_path(of_layers, gradient, displacement)
        return jax.tree.map(normalized, gradient, displacement)

    return Curvature("normalized_outer_product", product)


def adam_second_moment(units: str = "parameter") -> Curvature:
    """Take H = diag(nu), the Fisher diagonal that an inner Adam already holds.

    With `units="parameter"` the product passes through Adam's own preconditioner,
    `learning_rate * nu / sqrt(nu) * D = learning_rate * sqrt(nu) * D` per step; needs
    `learning_rate` and `second_moment`. With `units="gradient"` it is `nu * D` for true
    gradients; needs `second_moment` alone. `second_moment` is a tree like the gradient,
    in squared gradient units, bias-corrected (nu / (1 - b2**count)). No batch.
    """
    check_choice("units", units, ("parameter", "gradient"))

    def product(gradient, displacement, *, second_moment, learning_rate=None):
        def pull(d, nu):
            if units == "gradient":
                return widen(nu) * d
            return _rate(learning_rate, d) * jnp.sqrt(widen(nu)) * d

        return jax.tree.map(pull, displacement, second_moment)

    needs = _UNIT_NEEDS[units] | {"second_moment"}
    return Curvature("adam_second_moment", product, needs)


def hessian_vector(units: str = "gradient") -> Curvature:
    """Take H D exactly, as the derivative of `gradient_fn` at stale_params along D.

    Needs `gradient_fn(params) -> gradient` on a batch of the caller's choice, which
    it closes over, for the same (sub)tree as the updates, in gradient units: for one
    fragment, a function of that fragment with the other parameters closed over.
    Forward-over-reverse: one `jax.jvp` of the gradient, which holds the activations of
    one gradient and their tangents. A Hessian can be indefinite; `max_ratio` of
    `delay_compensation` is the guard. `units` are of the result (module docstring).
    """
    check_choice("units", units, get_args(Units))

    def product(gradient, displacement, *, gradient_fn, stale_params, **scales):
        tangent = cast_like(displacement, stale_params)
        curved = jax.jvp(gradient_fn, (stale_params,), (tangent,))[1]
        return _to_units(units, curved, **scales)

    needs = frozenset({"gradient_fn", "stale_params"}) | _UNIT_NEEDS[units]
    return Curvature("hessian_vector", product, needs)


def gauss_newton(units: str = "gradient") -> Curvature:
    """Take H D = J' H_out J D: the Hessian without the model's own second derivative.

    J is the Jacobian of `model_fn(params) -> outputs` at stale_params, H_out the
    Hessian of `output_loss_fn(outputs) -> scalar`. Positive semi-definite when that
    loss is convex in the outputs (cross-entropy, squares), exact when the model is
    linear. Both functions close over a batch of the caller's choice. One linearised
    forward pass, one tangent pass and its transpose, which holds the activations of one
    gradient and a copy of the outputs. `units` are of the result (module docstring).
    """
    check_choice("units", units, get_args(Units))

    def product(
        gradient, displacement, *, model_fn, output_loss_fn, stale_params, **scales
    ):
        tangent = cast_like(displacement, stale_params)
        outputs, jacobian = jax.linearize(model_fn, stale_params)
        output_gradient = jax.grad(output_loss_fn)
        curved = jax.jvp(output_gradient, (outputs,), (jacobian(tangent),))[1]
        (curved,) = jax.linear_transpose(jacobian, stale_params)(curved)
        return _to_units(units, curved, **scales)

    needs = frozenset({"model_fn", "output_loss_fn", "stale_params"})
    return Curvature("gauss_newton", product, needs | _UNIT_NEEDS[units])


def hutchinson(num_samples: int = 1, units: str = "gradient") -> Curvature:
    """Estimate H D = mean(z * H z) * D: an unbiased estimate of diag(H), times D.

    The mean runs over `num_samples` vectors z of random signs, one exact product each;
    its variance falls as 1 / num_samples. `units` are of the result (module docstring).
    Needs `gradient_fn` as `hessian_vector` does, and a `key`, a fresh one each
    step. The gradient is linearised once (its residuals are kept) and applied once
    per sample; one more tree holds the running sum. A diagonal cannot see how
    parameters interact: exact only where the Hessian is diagonal.
    """
    check_at_least("num_samples", num_samples, 1)
    check_choice("units", units, get_args(Units))

    def product(gradient, displacement, *, gradient_fn, stale_params, key, **scales):
        _, hessian = jax.linearize(gradient_fn, stale_params)

        def add_sample(total, sample_key):
            signs = optax.tree.random_like(
                sample_key, stale_params, sampler=jax.random.rademacher
            )
            signs = vary_like(signs, stale_params)
            sample = jax.tree.map(
                lambda s, h: widen(s) * widen(h), signs, hessian(signs)
            )

            return jax.tree.map(jnp.add, total, sample), None

        keys = jax.random.split(key, num_samples)
        # The sum starts from a sample, not from zeros, so that inside shard_map it
        # varies over the same mesh axes as what is added to it.
        zeros = optax.tree.zeros_like(jax.tree.map(widen, stale_params))
        first, _ = add_sample(zeros, keys[0])
        total, _ = jax.lax.scan(add_sample, first, keys[1:])
        curved = jax.tree.map(
            lambda h, d: h.astype(d.dtype) / num_samples * d, total, displacement
        )

        return _to_units(units, curved, **scales)

    needs = frozenset({"gradient_fn", "stale_params", "key"}) | _UNIT_NEEDS[units]
    return Curvature("hutchinson", product, needs)


_FACTORIES = {
    factory.__name__: factory
    for factory in (
        none,
        isotropic,
        outer_product,
        normalized_outer_product,
        adam_second_moment,
        hessian_vector,
        gauss_newton,
        hutchinson,
    )
}
Name = Literal[
    "none",
    "isotropic",
    "outer_product",
    "normalized_outer_product",
    "adam_second_moment",
    "hessian_vector",
    "gauss_newton",
    "hutchinson",
]
"""Names that `get` knows."""
NAMES = get_args(Name)


def get(name: str, **options) -> Curvature:
    """Build the curvature of that name, for configurations and command lines.

    The options are arguments of the factory of that name.

    >>> get("outer_product", units="gradient").needs
    frozenset({'learning_rate'})
    """
    check_choice("curvature", name, NAMES)
    return _FACTORIES[name](**options)


def as_curvature(argument: str, value: Any) -> Curvature:
    """Return a curvature, or the one of that name with its default options."""
    if isinstance(value, str):
        check_choice(argument, value, NAMES)
        return _FACTORIES[value]()
    if not isinstance(value, Curvature):
        raise ValueError(
            f"{argument}={value!r} must be one of {NAMES}, or a Curvature, as "
            "curvature.isotropic() gives"
        )
    return value


def _to_units(units, curved, learning_rate=None, second_moment=None):
    """Bring a product in gradient units to `units` (module docstring)."""
    if units == "gradient":
        return curved
    if units == "parameter":
        return jax.tree.map(lambda c: _rate(learning_rate, c) * widen(c), curved)

    # Adam before its first step has no units yet: 1e-8 alone would make them huge.
    some = [jnp.any(nu != 0) for nu in jax.tree.leaves(second_moment)]
    has_stepped = functools.reduce(jnp.logical_or, some, False)

    def scaled(c, nu):
        root = jnp.where(has_stepped, jnp.sqrt(widen(nu)) + 1e-8, jnp.inf)
        return _rate(learning_rate, c) * widen(c) / root

    return jax.tree.map(scaled, curved, second_moment)


def _rate(learning_rate, x):
    """Return a rate in the dtype that `x` is computed in."""
    return jnp.asarray(learning_rate, wide_dtype(x.dtype))
