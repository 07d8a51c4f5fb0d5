"""The table of methods: what each is composed of, and how it is asked for."""

import numpy as np
import optax
import pytest

import cocodc_jax
from cocodc_jax.sync import methods
from cocodc_jax.sync.schedule import adaptive, staggered
from cocodc_jax.transforms import curvature


def outer_steps(optimizer, gradients):
    """Outer values from 0 after each mean pseudo-gradient."""
    x, state, out = np.float32(0), optimizer.init(np.float32(0)), []
    for g in gradients:
        update, state = optimizer.update(np.float32(g), state, x)
        x = optax.apply_updates(x, update)
        out.append(float(x))
    return out


def test_defaults_are_the_papers():
    assert cocodc_jax.methods is methods
    assert methods.defaults("data_parallel") == methods.COMMON
    assert methods.defaults("diloco") == methods.COMMON | {
        "sync_interval": 500,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    }
    streaming = methods.defaults("streaming_diloco")
    assert (streaming["outer_lr"], streaming["mixing_alpha"]) == (0.4, 0.5)
    cocodc = methods.defaults("cocodc")
    assert (cocodc["curvature"], cocodc["compensation_strength"]) == ("isotropic", 0.3)
    paper = methods.defaults("cocodc_paper")
    assert paper["compensation_strength"] == 0.5
    assert methods.get("cocodc_paper").schedule == adaptive(100, 4, 5, 8)
    assert methods.get("cocodc").schedule == adaptive(100, 4, 5, 8)


def test_each_method_has_its_parts():
    parallel = methods.get("data_parallel")
    assert parallel.step_exchange.name == "mean_gradients"
    assert parallel.schedule is None
    assert parallel.num_fragments == 1
    diloco = methods.get("diloco", sync_interval=30)
    assert diloco.schedule == staggered(30, 1, 0)
    assert diloco.merge.name == "replace"
    streaming = methods.get("streaming_diloco", sync_interval=30, num_fragments=3)
    assert streaming.schedule == staggered(30, 3, 1)
    assert streaming.merge.name == "mix(0.5)"
    assert streaming.fragment_strategy == "strided"
    cocodc = methods.get(
        "cocodc", sync_interval=30, num_fragments=3, delay_steps=2,
        syncs_per_interval=5, transmission_score="aged", fragment_strategy="balanced",
    )  # fmt: skip
    assert cocodc.schedule == adaptive(30, 3, 2, 5, "aged")
    assert cocodc.fragment_strategy == "balanced"
    assert cocodc.num_fragments == 3
    assert cocodc.merge.needs_staged
    assert not any(m.step_exchange for m in (diloco, streaming, cocodc))
    assert not any(m.merge.needs_staged for m in (parallel, diloco, streaming))


def test_syncs_per_interval_is_twice_k_where_the_interval_allows():
    made = methods.get("cocodc", sync_interval=5, num_fragments=3, delay_steps=0)
    assert made.schedule == adaptive(5, 3, 0, 5)


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "cocodc"])
def test_the_outer_optimizer_is_nesterov(name):
    """m <- mu m + D; x <- x - eta (D + mu m): with D = 1, 1, eta 0.5, mu 0.5.

    First m = 1, x = -0.75; then m = 1.5, x = -0.75 - 0.5 * 1.75.
    """
    made = methods.get(name, outer_lr=0.5, outer_momentum=0.5)
    assert outer_steps(made.outer_optimizer, [1, 1]) == [-0.75, -1.625]
    plain = methods.get(name, outer_lr=0.5, outer_momentum=0.0)
    assert outer_steps(plain.outer_optimizer, [1, 1]) == [-0.5, -1.0]


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, {"delay_steps"}),
        ({"curvature": "outer_product"}, set()),
        (
            {"curvature": "outer_product", "curvature_units": "gradient"},
            {"learning_rate"},
        ),
        ({"curvature": "none"}, set()),
        ({"curvature": "isotropic"}, {"delay_steps"}),
        ({"curvature": "adam_second_moment"}, {"learning_rate", "second_moment"}),
        (
            {"curvature": "hessian_vector"},
            {"gradient_fn", "stale_params", "learning_rate", "second_moment"},
        ),
        (
            {"curvature": "hessian_vector", "curvature_units": "parameter"},
            {"gradient_fn", "stale_params", "learning_rate"},
        ),
        (
            {"curvature": curvature.hessian_vector("parameter")},
            {"gradient_fn", "stale_params", "learning_rate"},
        ),
    ],
)
def test_curvature_tells_the_runtime_what_it_needs(options, needs):
    assert methods.get("cocodc", **options).merge.needs == needs


def test_the_papers_curvature_is_divided_by_the_interval():
    """g = 1, D = 2, lambda 0.5, H 10: g~ = 1 + 0.5 * 1 * 2 / 10 = 1.1; 2 - 1.1."""
    made = methods.get("cocodc_paper", sync_interval=10, num_fragments=1, delay_steps=1)
    one = lambda x: {"w": np.full(1, x, np.float32)}  # noqa: E731
    merged, _ = made.merge.apply(one(-1.0), one(0.0), one(2.0), delay_steps=1)
    np.testing.assert_allclose(merged["w"], [0.9], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "adaloco",
            {},
            r"method='adaloco' is unknown; use one of \['apart',",
        ),
        ("data_parallel", {"outer_lr": 1.0}, "no argument 'outer_lr'; it takes c"),
        (
            "diloco",
            {"num_fragments": 2},
            "method='diloco' has no argument 'num_fragments'; it takes sync_interval, ",
        ),
        ("diloco", {"outer_lr": 0.0}, "outer_lr=0.0 must be positive"),
        ("cocodc", {"outer_momentum": 1.0}, r"outer_momentum=1.0 must be in \[0, 1\)"),
        ("diloco", {"outer_momentum": -0.1}, "outer_momentum=-0.1 must be in"),
        ("streaming_diloco", {"mixing_alpha": 2}, "mixing_alpha=2 must be in"),
        ("streaming_diloco", {"num_fragments": 3}, "sync_interval=100 is not a mult"),
        ("cocodc", {"num_fragments": 0}, "num_fragments=0 must be at least 1"),
        ("cocodc", {"syncs_per_interval": 3}, "syncs_per_interval=3 must be at least"),
        ("cocodc", {"delay_steps": 101}, "delay_steps=101 is longer than"),
        ("cocodc", {"transmission_score": "x"}, "score='x' is unknown; use one of"),
        ("cocodc", {"curvature": "flat"}, "curvature='flat' is unknown; use one of"),
        (
            "cocodc",
            {"curvature": "none", "curvature_units": "adam"},
            "curvature_units='adam' was given, but curvature='none' has no choice",
        ),
        (
            "cocodc",
            {"curvature": "outer_product", "curvature_units": "furlong"},
            "units='furlong' is unknown; use one of",
        ),
        (
            "cocodc",
            {
                "curvature": curvature.outer_product(units="gradient"),
                "curvature_units": "parameter",
            },
            "curvature_units='parameter' was given, but .*'outer_product' is made",
        ),
    ],
)
def test_errors_name_the_argument_and_the_repair(name, options, message):
    with pytest.raises(ValueError, match=message):
        methods.get(name, **options)


def test_defaults_of_an_unknown_method():
    with pytest.raises(ValueError, match="method='adaloco' is unknown; use one of"):
        methods.defaults("adaloco")
