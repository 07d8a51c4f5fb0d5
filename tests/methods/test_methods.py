"""The table of methods: defaults, refused arguments, and the text of its files."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import cocodc_jax
from cocodc_jax import methods
from cocodc_jax.methods import METHODS
from cocodc_jax.methods.contrib.eager import eager_outer
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules import adaptive
from cocodc_jax.sync.summed import SummedFactors
from cocodc_jax.transforms import curvature
from cocodc_jax.transforms.sparsify import top_k

ROOT = pathlib.Path(__file__).parents[2]
GRADIENTS = curvature.outer_product(units="gradient")


def test_defaults_are_the_papers():
    assert cocodc_jax.methods is methods
    assert methods.defaults("data_parallel") == methods.COMMON
    assert methods.defaults("diloco") == methods.COMMON | {
        "sync_interval": 500,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "router_interval": None,
    }

    streaming = methods.defaults("streaming_diloco")
    assert (streaming["outer_lr"], streaming["mixing_alpha"]) == (0.4, 0.5)
    cocodc = methods.defaults("cocodc")
    assert (cocodc["curvature"], cocodc["compensation_strength"]) == ("isotropic", 0.3)

    paper = methods.defaults("cocodc_paper")
    assert paper["compensation_strength"] == 0.5
    assert methods.get("cocodc_paper").schedule == adaptive(100, 4, 5, 8)
    assert methods.get("cocodc").schedule == adaptive(100, 4, 5, 8)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adaloco", {}, r"method='adaloco' is unknown; use one of \['apart',"),
        ("data_parallel", {"outer_lr": 1.0}, "no argument 'outer_lr'; it takes c"),
        ("diloco", {"num_fragments": 2},
         "method='diloco' has no argument 'num_fragments'; it takes sync_interval, "),
        ("diloco", {"outer_lr": 0.0}, "outer_lr=0.0 must be positive"),
        ("diloco", {"outer_lr": "0.7"}, "outer_lr='0.7' must be positive"),
        ("diloco", {"outer_momentum": None}, "outer_momentum=None must be at least 0"),
        ("cocodc", {"curvature": "bogus"}, "curvature='bogus' is .* 'secant'"),
        ("cocodc_paper", {"rule": "code", "relative_strength": -1.0}, "strength=-1.0"),
        ("dilocox", {"min_rank": 0, "adaptive_rank": False}, "min_rank=0 must be at"),
        ("decoupled_diloco", {"answer_steps": [1, 2]}, r"answer_steps=\[1, 2\] must"),
        ("cocodc", {"outer_momentum": 1.0}, "outer_momentum=1.0 must be at least 0"),
        ("diloco", {"outer_momentum": -0.1}, "outer_momentum=-0.1 must be at "),
        ("sparseloco", {"compress": "zip"}, "compress='zip': 'zip' is not one of"),
        ("co2", {"momentum_clip": 0.0}, "momentum_clip=0.0 must be positive"),
        ("co2", {"outer_lr": float("nan")}, "outer_lr=nan must be positive"),
        ("mla", {"outer_lr": -0.7}, "outer_lr=-0.7 must be positive"),
        ("heloco", {"outer_momentum": 1.5}, "outer_momentum=1.5 must be at least 0"),
        ("heloco", {"turn_rate": float("inf")}, "turn_rate=inf must be at least 0"),
        ("heloco", {"arrival_weight": 0.0}, "arrival_weight=0.0 must be positive"),
        ("diloco_demo", {"outer_lr": 0.0}, "outer_lr=0.0 must be positive"),
        ("noloco", {"outer_lr": -1.0}, "outer_lr=-1.0 must be positive"),
        ("lt_admm", {"admm_penalty": float("nan")}, "admm_penalty=nan must be"),
        ("delayed_nesterov", {"arrivals_per_momentum": 0},
         "arrivals_per_momentum=0 must be at least 1"),
        ("distributed_lion", {"lion_beta1": 1}, "lion_beta1=1 must be at least 0"),
        ("distributed_lion", {"lion_beta2": 2}, "lion_beta2=2 must be at least 0"),
        ("distributed_lion", {"lion_beta2": -1.0}, "lion_beta2=-1.0 must be at least"),
        ("demo", {"momentum_decay": 1.0}, "momentum_decay=1.0 must be at least 0"),
        ("diloco_demo", {"outer_momentum": 1.0}, "outer_momentum=1.0 must be at leas"),
        ("lt_admm", {"admm_penalty": 0}, "admm_penalty=0 must be positive"),
        ("cocodc", {"compensation_strength": float("nan")},
         "compensation_strength=nan must be a finite number"),
        ("cocodc", {"compensation_strength": abs},
         "compensation_strength=<built-in function abs> must be a number: every"),
        ("cocodc", {"progress_weight": 1.5}, "progress_weight=1.5 must be between 0"),
        ("cocodc", {"progress_weight": 0.5, "curvature": "secant"},
         "progress_weight=0.5 must be 1 with curvature='secant'"),
        ("cocodc", {"curvature": "none", "curvature_units": "adam"},
         "curvature_units='adam' was given, but curvature='none' has no choice"),
        ("cocodc", {"curvature": "secant", "curvature_units": "adam"},
         "curvature_units='adam' was given, but curvature='secant' has no choice"),
        ("cocodc", {"curvature": "outer_product", "curvature_units": "furlong"},
         "curvature_units='furlong' is not for curvature='outer_product': units='fur.*'"
         r" is unknown; use one of \('parameter', 'gradient'\)"),
        ("cocodc", {"curvature": GRADIENTS, "curvature_units": "parameter"},
         "curvature_units='parameter' was given, but .*'outer_product' is made"),
        ("cocodc_paper", {"rule": "spirit"}, "rule='spirit' is unknown; use one of"),
        ("cocodc_paper", {"relative_strength": 0.2},
         "relative_strength=0.2 has no meaning with rule='text'; leave it out"),
        ("cocodc_paper", {"rule": "code", "compensation_strength": 0.2},
         "compensation_strength=0.2 has no meaning with rule='code'; leave it"),
        ("noloco", {"outer_momentum": 1.0}, "outer_momentum=1.0 must be at least 0"),
        ("noloco", {"outer_momentum": 0.9},
         r"outer_lr=0.7, which is pair_pull if that is left out, must be .* = 0.38"),
        ("noloco", {"pair_pull": "strong"}, "pair_pull='strong' must be a finite num"),
        ("noloco", {"pair_pull": 1.5}, "pair_pull=1.5 must be above 0 .* = 1.5 with"),
        ("noloco", {"pair_pull": 0.0}, "pair_pull=0.0 must be above 0"),
        ("sparseloco", {"compress": "int4", "clip": True},
         "clip=True has no meaning for compress='int"),
        ("sparseloco", {"compress": "ef+threshold:0.1"},
         "sparse_mean='senders' needs messages that tell which entries they have"),
        ("decoupled_diloco", {"compress": "ef+topk:0.1"}, "lengths of layers that are"),
        ("decoupled_diloco", {"grace_steps": -1}, "grace_steps=-1 must be at least 0"),
        ("decoupled_diloco", {"delay_steps": "auto"}, "delay_steps='auto' must be"),
        ("noloco", {"pair_seed": -1}, "pair_seed=-1 must be at least 0"),
        ("decoupled_diloco", {"quorum": 0}, "quorum=0 must be at least 1"),
        ("decoupled_diloco", {"answer_steps": "1,2", "quorum": 3},
         "quorum=3 must .* at most the 2 reg"),
        ("decoupled_diloco", {"quorum": 2.5}, "quorum=2.5 must be a whole number"),
        ("decoupled_diloco", {"answer_steps": "1,x"},
         "answer_steps='1,x' must be numbers of steps"),
        ("decoupled_diloco", {"answer_steps": "1,-2"},
         "answer_steps='1,-2' must be numbers of steps"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_the_repair(name, options, message):
    with pytest.raises(ValueError, match=message):
        methods.get(name, **options)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_built_from_its_defaults(name):
    method = methods.get(name)
    assert method.name == name
    assert (method.sync is None) or (method.per_step is None)
    options = {k: v for k, v in methods.defaults(name).items() if v is not None}
    if name not in ("apart", "distributed_lion", "snoo", "gpa"):
        assert methods.get(name, **options).name == name
    assert set(methods.COMMON) <= set(methods.defaults(name))


@pytest.mark.parametrize("name", METHODS)
def test_every_argument_is_explained(name):
    """What follows `Args:` becomes the help of flags."""
    text = METHODS[name].__doc__
    for argument in set(methods.defaults(name)) - set(methods.COMMON):
        assert f"\n      {argument}: " in text, argument


@pytest.mark.parametrize("name", METHODS)
def test_every_file_of_a_method_is_its_algorithm(name):
    """Source, certainty and measurements stand where the method is made."""
    module = sys.modules[METHODS[name].__module__]
    assert name in (module.__name__.split(".")[-1], "cocodc_paper")
    text = module.__doc__ or ""
    assert 14 <= text.count("\n") <= 80
    assert text.count("$$") % 2 == 0 < text.count("$$")
    for heading in ("Source:", "Differs from", "Defaults:", "Measured here:"):
        assert heading in text, heading
    assert f"`{name}`" in text


def test_the_table_of_the_package_names_every_method():
    for name in METHODS:
        assert f"\n{name} " in methods.__doc__, name


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_methods_lists_every_method(name):
    assert f"[`{name}`](" in (ROOT / "docs/methods/index.md").read_text()


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("README.md", f"Streaming DiLoCo, data parallel and [{len(METHODS) - 4} more"),
        ("docs/other_tools.md", f"{len(METHODS)} methods in JAX as one program"),
    ],
)
def test_documents_count_the_methods(page, sentence):
    text = " ".join((ROOT / page).read_text().split())
    assert sentence in text


# --- DiLoCoX, eager updates, Decoupled DiLoCo ---


def test_summed_factors_have_their_own_message():
    method = methods.get("dilocox", rank=8, sum_factors=True)
    assert method.sync.message == SummedFactors(8, True)
    assert method.sync.only_in_program.startswith("its second factors are made of")
    with pytest.raises(ValueError, match="compress='int8'.*sum_factors=False"):
        methods.get("dilocox", sum_factors=True, compress="int8")


def test_eager_counts_the_decoded_message():
    """Top 1 of (4, 1) is (4, 0): the 1 is in no mean, so not in the share."""
    outer = eager_outer(optax.sgd(1.0))
    compressor = top_k(0.5)
    zero = jnp.zeros(2)
    local = jnp.array([-4.0, -1.0])
    key = jax.random.key(0)

    _, state = outer.send(zero, outer.init(zero, compressor), local, compressor, key)
    params, _ = outer.receive(zero, state, zero, 2)
    assert params.tolist() == [-2, 0]


class TestQuorum:
    """`decoupled_diloco`: when a fragment is merged, and from which regions."""

    @pytest.mark.parametrize(
        ("answers", "quorum", "grace", "delay", "participating"),
        [
            ("", 1, 2, 7, None),
            ("1,1,2,9", 1, 0, 1, (0, 1)),
            ("1,1,2,9", 1, 1, 2, (0, 1, 2)),
            ("1,1,2,9", 3, 0, 2, (0, 1, 2)),
            ("1,1,2,9", 3, 50, 9, (0, 1, 2, 3)),  # Not longer than for all.
            ("9,0,3", 2, 0, 3, (1, 2)),
            ("0,0", 2, 5, 0, (0, 1)),
        ],
    )
    def test_the_quorum_decides_the_delay(
        self, answers, quorum, grace, delay, participating
    ):
        method = methods.get(
            "decoupled_diloco",
            answer_steps=answers,
            quorum=quorum,
            grace_steps=grace,
            sync_interval=100,
            num_fragments=4,
            delay_steps=7,
        )

        assert method.schedule.delay_steps == delay
        assert method.schedule.participating == participating

        _, event = method.schedule.next_event(method.schedule.init(), 25)
        assert event.participating == participating

    def test_a_quorum_is_among_the_regions(self):
        method = methods.get("decoupled_diloco", quorum=3)
        method.bind(Regions.alike(3))
        message = "regions=2 must be at least 3 for method='decoupled_diloco'"
        with pytest.raises(ValueError, match=message):
            method.bind(Regions.alike(2))

    def test_weights_are_tokens_times_tokens_per_step(self):
        """4 steps of 2 sequences against 2 steps of 4; and a region that did none."""
        method = methods.get("decoupled_diloco")
        regions = Regions((1.0, 2.0, 5.0), (2, 4, 1))
        weights = regions.weights(0, 4, method.sync.weigh)
        assert weights.tolist() == [16 / 48, 32 / 48, 0]
