"""A method as one Optax transform is the region program, wherever regions are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from cocodc_jax.aot import hlo
from cocodc_jax.core.checks import unboxed
from cocodc_jax.sync.cutting import cut
from tests.jaxprs import equations
from tests.numerics import assert_all_close
from tests.program import tiny
from tests.program.test_family import OPTIMIZERS, OPTIONS, finish, num_regions_of
from tests.slow import mostly_slow

NUM_STEPS = 17
CUT = 7
SHORT = {"sync_interval": 8, "num_fragments": 2, "delay_steps": 2}
ADAM = optax.adam(0.05)

# What methods are made of, besides the table of methods: name, arguments, optimizer.
SGD = optax.sgd(0.05)
PLATEAU = optax.chain(SGD, optax.contrib.reduce_on_plateau(patience=1))
VARIANTS = {
    "a whole interval late": ("streaming_diloco", SHORT | {"delay_steps": 8}),
    "sooner by a phase": ("streaming_diloco", SHORT | {"phase_steps": 2}),
    "merge feedback": (
        "streaming_diloco",
        SHORT | {"compress": "ef+int8", "merge_feedback": True},
    ),
    "second moment": ("cocodc", SHORT | {"curvature": "adam_second_moment"}, ADAM),
    "drift, by the loss": (
        "cocodc",
        SHORT | {"curvature": "hessian_vector", "transmission_score": "drift"},
        ADAM,
    ),
    "by the outputs": ("cocodc", SHORT | {"curvature": "gauss_newton"}, ADAM),
    "disagreement": ("cocodc", SHORT | {"transmission_score": "disagreement"}),
    "as coded": ("cocodc_paper", SHORT | {"rule": "code"}),
    "midway": ("cocodc", SHORT | {"curvature": "secant"}),
    "some regions": (
        "decoupled_diloco",
        OPTIONS["decoupled_diloco"] | {"compress": "ef+int8"},
    ),
    "factors summed": ("dilocox", OPTIONS["dilocox"] | {"sum_factors": True}),
    "mean loss": ("data_parallel", {}, PLATEAU),
}
ONE_BY_ONE = ("delayed_nesterov", "mla", "heloco")
CASES = {
    name: (name, options, OPTIMIZERS.get(name, SGD))
    for name, options in OPTIONS.items()
    if name not in ONE_BY_ONE
} | {name: (*case, SGD)[:3] for name, case in VARIANTS.items()}
# One of each kind of part; the rest are cases beside them.
QUICK = (
    "loscar", "multi_ring", "des_loc", "co2", "noloco", "lt_admm", "distributed_lion",
    "merge feedback",
    "drift, by the loss", "midway", "some regions", "factors summed",
)  # fmt: skip


def make_step(loss, tx):
    def step(carry, batch):
        params, state = carry

        def value_fn(params):
            return loss(params, batch, jax.random.key(0))[0]

        value, grads = jax.value_and_grad(value_fn)(params)
        extra = {"value": value, "value_fn": value_fn, "batch": batch}
        updates, state = tx.update(grads, state, params, unknown=object(), **extra)
        return (optax.apply_updates(params, updates), state), value

    return step


def batches_of(num_regions, num_steps=NUM_STEPS):
    """Leaves `[R, T, ...]`."""
    steps = map(tiny.make_batch, range(num_steps))
    return jax.tree.map(lambda *x: np.stack(x, 1)[:num_regions], *steps)


def for_all(tree, num_regions):
    return laid_out(0, tree, num_regions)


def laid_out(axes, tree, num_regions):
    """Put an axis of regions in front of regional leaves, by a prefix of 0 and None."""
    spread = jax.vmap(lambda x: x, None, axes, axis_size=num_regions)
    return spread(jax.tree.map(jnp.asarray, tree))


def mapped(fn, axes, **options):
    return jax.vmap(
        fn, in_axes=(axes, 0), out_axes=(axes, 0), axis_name="region", **options
    )


def train(tx, method, num_regions, num_steps=NUM_STEPS, params=None):
    """Run a scan under vmap, with one outer model; returns parameters and state."""
    axes = (0, cc.sync_axes(method))
    params = tiny.make_params() if params is None else params
    carry = laid_out(axes, (params, tx.init(params)), num_regions)
    step = make_step(tiny.loss_fn, tx)
    scan = mapped(lambda carry, xs: jax.lax.scan(step, carry, xs), axes)
    carry, _ = jax.jit(scan)(carry, batches_of(num_regions, num_steps))
    return carry


def reference(optimizer, method, num_regions, num_steps=NUM_STEPS, params=None):
    """Return the state of the region program, trained step by step."""
    params = tiny.make_params() if params is None else params
    program = tiny.program_of(
        method, optimizer=optimizer, regions=num_regions, params=params
    )
    state, _ = finish(program, program.init(params, jax.random.key(0)), num_steps)
    return state


reference_once = functools.cache(reference)  # For cases that share one.
assert_near = functools.partial(assert_all_close, rtol=0)


@pytest.mark.parametrize("case", mostly_slow(CASES, quick=QUICK))
def test_every_method_trains_what_the_region_program_does(case):
    check_case(case, tiny.make_params(), np.float32, 1e-6)


def check_case(case, params, dtype, atol):
    name, options, optimizer = CASES[case]
    # Two regions have one matching, whichever side draws it.
    num_regions = 2 if name == "noloco" else num_regions_of(name)
    method = cc.methods.get(name, **options)
    tx = cc.synchronized(
        optimizer, method, axis_name="region", user_inputs=tiny.USER_INPUTS
    )
    trained, state = train(tx, method, num_regions, params=params)
    expected = reference(optimizer, method, num_regions, params=params)

    assert trained["head"].dtype == dtype
    assert_near(trained, expected.region.params, atol=atol)

    metrics = cc.sync_metrics(state)
    assert metrics["bytes_sent"] == expected.bytes_sent

    if expected.sync is not None:
        flying = len(expected.sync.schedule.in_flight)
        assert metrics["fragments_in_flight"] == flying
        assert_near(state.outer, expected.sync.outer.params, atol=atol)


@pytest.mark.parametrize("case", mostly_slow(["cocodc", "eager"], quick=["cocodc"]))
def test_in_float64_the_transform_is_the_region_program_to_rounding(case):
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, tiny.make_params())
        check_case(case, params, np.float64, 1e-12)


@pytest.mark.parametrize("compress", [None, "ef+topk:0.34"])
def test_a_late_region_keeps_its_memory_and_does_not_affect_means(compress):
    """The third region's batches are NaN from the second step on."""
    method = cc.methods.get(
        "decoupled_diloco",
        sync_interval=1,
        num_fragments=1,
        averaging="mean",
        answer_steps="0,0,9,0",
        grace_steps=0,
        mixing_alpha=0.0,
        compress=compress,
    )
    tx = cc.synchronized(SGD, method, axis_name="region")
    axes = cc.sync_axes(method)
    program = tiny.program_of(method, optimizer=SGD)
    params = tiny.make_params()
    carry = laid_out((0, axes), (params, tx.init(params)), 4)
    go = jax.jit(mapped(make_step(tiny.loss_fn, tx), (0, axes)))
    state = program.init(params, jax.random.key(0))
    for i in range(3):
        batch = tiny.make_batch(i)
        batch["x"][2] *= np.nan if i else 1
        carry, _ = go(carry, batch)
        state, _ = program.advance(state, jax.tree.map(lambda x: x[None], batch))

    assert np.isfinite(carry[0]["head"]).all((1, 2)).tolist() == [1, 1, 0, 1]
    assert_near(carry[0], state.region.params, atol=1e-6)
    assert_near(carry[1].memories, state.sync.compressors, atol=1e-6)
    assert all((x[2] == 0).all() for x in jax.tree.leaves(carry[1].memories))


# Adaptive, with a delay.
COCODC = cc.methods.get("cocodc", **SHORT)
SPECS = cc.sync_axes(COCODC, P("region"), P())


@pytest.fixture(scope="module")
def expected():
    """The runs of uncompressed messages, and of gathered ones with error feedback."""

    @functools.cache
    def run(compress):
        method = cc.methods.get("cocodc", **SHORT, compress=compress)
        tx = cc.synchronized(ADAM, method, axis_name="region", num_regions=4)
        return tx, train(tx, method, 4)

    return run


@pytest.fixture(scope="module")
def tx(expected):
    return expected(None)[0]


def regions_mesh():
    devices = np.array(jax.devices()[:4])
    return Mesh(devices, ("region",), axis_types=(AxisType.Auto,))


def scan_of(step):
    return lambda carry, xs: jax.lax.scan(step, carry, xs)[0]


def in_vmap(step, carry, batches):
    """All state is regional, the M outer models too."""
    return jax.vmap(scan_of(step), axis_name="region")(for_all(carry, 4), batches)


def on_a_mesh(step, carry, batches):
    axes = (0, cc.sync_axes(COCODC))
    specs = (P("region"), SPECS)
    lay = functools.partial(NamedSharding, regions_mesh())
    where = jax.tree.map(lay, specs, is_leaf=lambda x: isinstance(x, P))
    carry = jax.device_put(laid_out(axes, carry, 4), where)
    scan = lambda carry, xs: jax.lax.scan(step, carry, xs)  # noqa: E731
    scan = mapped(scan, axes, spmd_axis_name="region")
    carry, _ = scan(carry, jax.device_put(batches, lay(P("region"))))
    return jax.lax.with_sharding_constraint(carry, where)


def in_shard_map(step, carry, batches, check_vma=True, is_one=False):
    """One device a region, and all of a region's own, or one outer model."""
    where = (P("region"), SPECS if is_one else P("region"))
    specs = jax.tree.broadcast(where, carry, is_leaf=lambda x: isinstance(x, P))

    def change(fn, carry):
        pick = lambda x, spec: fn(x) if spec == P("region") else x  # noqa: E731
        return jax.tree.map(pick, carry, specs)

    def of_region(carry, xs):
        local = change(lambda x: x[0], carry), jax.tree.map(lambda x: x[0], xs)
        return change(lambda x: x[None], scan_of(step)(*local))

    go = jax.shard_map(
        of_region,
        mesh=regions_mesh(),
        in_specs=(specs, P("region")),
        out_specs=specs,
        check_vma=check_vma,
    )
    return go(change(lambda x: jnp.stack([x] * 4), carry), batches)


@pytest.mark.parametrize(
    ("how", "compress"),
    [
        pytest.param(in_vmap, None, id="vmap"),
        pytest.param(on_a_mesh, "ef+int8", id="spmd_axis_name"),
        pytest.param(in_shard_map, "ef+int8", id="shard_map", marks=pytest.mark.slow),
        pytest.param(
            functools.partial(in_shard_map, is_one=True), None, id="one outer model"
        ),
        # JAX cannot see that a gathered value is replicated.
        pytest.param(
            functools.partial(in_shard_map, is_one=True, check_vma=False),
            "ef+int8",
            id="one, gathered",
        ),
    ],
)
def test_every_placement_of_regions_gives_the_same_run(expected, how, compress):
    tx, (params, state) = expected(compress)
    step = make_step(tiny.loss_fn, tx)
    first = tiny.make_params()
    go = jax.jit(functools.partial(how, step))
    trained, after = go((first, tx.init(first)), batches_of(4))
    assert_near(trained, params, atol=1e-6)
    sent = cc.sync_metrics(after)["bytes_sent"]
    assert (sent == cc.sync_metrics(state)["bytes_sent"]).all()


def test_a_state_restored_in_mid_flight_goes_on_without_recompilation(
    tx, expected, tmp_path
):
    """One trace serves all steps, and a file can hold every leaf of the state."""
    axes = (0, cc.sync_axes(COCODC))
    traces = []
    step = make_step(tiny.loss_fn, tx)

    @functools.partial(jax.jit, donate_argnums=0)
    def go(carry, batch):
        traces.append(1)
        return mapped(step, axes)(carry, batch)[0]

    params = tiny.make_params()
    carry = laid_out(axes, (params, tx.init(params)), 4)
    for i in range(NUM_STEPS):
        if i == CUT:
            assert cc.sync_metrics(carry)["fragments_in_flight"] == 1
            leaves, structure = jax.tree.flatten(carry)
            np.savez(tmp_path / "state.npz", *leaves)
            with np.load(tmp_path / "state.npz") as saved:
                carry = structure.unflatten(saved[name] for name in saved.files)
        carry = go(carry, tiny.make_batch(i))

    assert len(traces) == 1
    assert_near(carry, expected(None)[1], atol=1e-6)


@pytest.mark.parametrize("is_one", [True, False])
def test_mapped_regions_keep_scalar_predicates_of_loops(tx, is_one):
    """A predicate with an axis of regions would turn loops into selects."""
    params = tiny.make_params()
    axes = (0, cc.sync_axes(COCODC) if is_one else 0)
    carry = laid_out(axes, (params, tx.init(params)), 4)
    step = mapped(make_step(tiny.loss_fn, tx), axes)
    jaxpr = jax.make_jaxpr(step)(carry, tiny.make_batch(0)).jaxpr
    loops = [e for e in equations(jaxpr) if e.primitive.name == "while"]

    # One around all, and for each fragment one to start and one to finish.
    assert len(loops) >= 1 + 2 * 2

    for eqn in loops:
        (predicate,) = eqn.params["cond_jaxpr"].jaxpr.outvars
        assert predicate.aval.shape == ()


@pytest.mark.parametrize(
    ("name", "options", "regional", "shared"),
    [
        ("data_parallel", {}, 2, 0),
        ("diloco", {}, 2, 2),
        ("streaming_diloco", SHORT, 2, 3),
        ("cocodc", SHORT, 3, 3),
        ("cocodc", SHORT | {"compress": "ef+int8"}, 4, 3),
        ("noloco", {}, 4, 0),
    ],
)
def test_the_state_has_the_documented_size(name, options, regional, shared):
    """Sizes are in copies of the parameters, as in the documentation."""
    params = {"blocks": {str(i): jnp.zeros((64, 64)) for i in range(2)}}
    method = cc.methods.get(name, **options)
    tx = cc.synchronized(optax.adamw(0.1), method, axis_name="region")
    state = jax.eval_shape(tx.init, params)
    num_bytes = {0: 0, 1: 0}
    for part, axis in zip(state, cc.sync_axes(method, 0, 1), strict=True):
        num_bytes[axis] += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part))
    assert [x // (2 * 64 * 64 * 4) for x in num_bytes.values()] == [regional, shared]
    assert sum(num_bytes.values()) % (64 * 64) < 200


def loops_around(module, opcode, computation=None, depth=0):
    """Of each instruction of a compiled program, the number of loops around it."""
    for instruction in module.computations[computation or module.entry].instructions:
        if instruction.opcode == opcode:
            yield depth
        for how, names in instruction.called.items():
            for name in names:
                is_body = how == "body"
                yield from loops_around(module, opcode, name, depth + is_body)


def test_compiled_code_of_events_stays_inside_their_loops():
    """XLA must not hoist code of an event, which would then run at every step."""
    options = SHORT | {"num_fragments": 1, "compress": "int8"}
    method = cc.methods.get("streaming_diloco", **options)
    tx = cc.synchronized(optax.sgd(0.1), method, axis_name="region")
    axes = (0, cc.sync_axes(method))
    params = {"w": jnp.ones(4)}
    step = make_step(lambda params, x, key: ((params["w"] * x).sum(), {}), tx)
    scan = mapped(lambda carry, xs: jax.lax.scan(step, carry, xs), axes)
    lowered = jax.jit(scan).lower(
        laid_out(axes, (params, tx.init(params)), 2), jnp.ones((2, 5, 4))
    )

    # The optimizations that tests leave out.
    compiled = lowered.compile({"xla_backend_optimization_level": 2})
    module = hlo.parse(compiled.as_text())
    # Inside the scan, the events, and the fragment's: the message, and the mean's norm.
    assert set(loops_around(module, "round-nearest-even")) == {3}
    assert set(loops_around(module, "sqrt")) == {3}


def of_regions(fn):
    return jax.vmap(fn, (None, 0), axis_name="region")


@pytest.fixture(scope="module")
def two_trials(tx):
    """Two trials of different parameters, each trained alone."""
    params = tiny.make_params()
    first = [params, params | {"head": 0 * params["head"]}]
    carries = [(params, tx.init(params)) for params in first]
    go = jax.jit(of_regions(scan_of(make_step(tiny.loss_fn, tx))))
    return carries, [go(carry, batches_of(4)) for carry in carries]


@pytest.mark.parametrize("is_around", [True, False])
def test_vmapped_trials_choose_their_events_independently(tx, two_trials, is_around):
    """An axis of trials may be outside or inside of the axis of regions."""
    scan = scan_of(make_step(tiny.loss_fn, tx))
    carries, alone = two_trials
    trials = jax.tree.map(lambda *x: jnp.stack(x), *carries)

    def of_trials(fn):
        return jax.vmap(fn, (0, None))

    go = of_trials(of_regions(scan)) if is_around else of_regions(of_trials(scan))
    trained, state = jax.jit(go)(trials, batches_of(4))
    axis = 0 if is_around else 1
    wanted = jax.tree.map(lambda *x: jnp.stack(x, axis), *(x[0] for x in alone))
    assert_near(trained, wanted, atol=1e-6)
    last = [x[1].times.last_start for x in alone]
    assert not np.array_equal(*last)
    np.testing.assert_array_equal(state.times.last_start, jnp.stack(last, axis))


FROZEN = {"embed": "frozen", "blocks": "trained", "head": "trained"}
IS_TRAINED = {"embed": False, "blocks": True, "head": True}
DILOCO = cc.methods.get("diloco", sync_interval=4)
HALVED = optax.chain(SGD, optax.masked(optax.scale(0.5), IS_TRAINED))


def frozen(trained):
    parts = {"trained": trained, "frozen": optax.set_to_zero()}
    return optax.multi_transform(parts, FROZEN)


FROZEN_SGD = frozen(SGD)


def synchronized(inner):
    return cc.synchronized(inner, DILOCO, axis_name="region")


# The transform, and an optimizer for the program; an accumulation around counts as one
# step what are two of the program's.
WRAPPED = {
    "rate inside": (synchronized(optax.inject_hyperparams(optax.sgd)(0.05)), SGD),
    "rate around": (
        optax.inject_hyperparams(lambda rate: synchronized(optax.sgd(rate)))(rate=0.05),
        SGD,
    ),
    "in a chain": (optax.chain(optax.scale(0.5), synchronized(optax.sgd(0.1))), SGD),
    "frozen inside": (synchronized(FROZEN_SGD), FROZEN_SGD),
    "frozen around": (frozen(synchronized(SGD)), FROZEN_SGD),
    "masked inside": (synchronized(HALVED), HALVED),
    "accumulated inside": (
        synchronized(optax.MultiSteps(SGD, 2)),
        optax.MultiSteps(SGD, 2),
    ),
    "accumulated around": (
        optax.MultiSteps(synchronized(SGD), 2),
        optax.MultiSteps(SGD, 2),
    ),
    "with the loss as an extra argument": (synchronized(PLATEAU), PLATEAU),
}
# A rate that is a state is one anywhere, and labels freeze what masks leave out.
WRAPPED_QUICK = WRAPPED.keys() - {"rate inside", "frozen inside"}


@pytest.mark.filterwarnings("ignore:the optimizer leaves .* leaves as they are")
@pytest.mark.parametrize("name", mostly_slow(WRAPPED, quick=WRAPPED_QUICK))
def test_the_transform_works_inside_and_around_other_transforms(name):
    tx, optimizer = WRAPPED[name]
    carry = for_all((tiny.make_params(), tx.init(tiny.make_params())), 4)
    scan = jax.vmap(scan_of(make_step(tiny.loss_fn, tx)), axis_name="region")
    num_steps = 10
    params, state = jax.jit(scan)(carry, batches_of(4, num_steps))
    method = DILOCO
    if name == "accumulated around":
        method = cc.methods.get("diloco", sync_interval=8)
    expected = reference_once(optimizer, method, 4, num_steps)

    assert_near(params, expected.region.params, atol=1e-6)
    assert (cc.sync_metrics(state)["norm"] > 0).all()


def test_bfloat16_parameters_are_merged_to_rounding():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tiny.make_params())
    method = cc.methods.get("diloco", sync_interval=1, outer_momentum=0.0)
    tx = cc.synchronized(optax.sgd(0.05), method, axis_name="region")
    state = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves(state.outer)} == {jnp.dtype("float32")}

    updates, state = jax.vmap(tx.update, in_axes=(0, None, None), axis_name="region")(
        for_all(params, 2), state, params
    )
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}

    merged = jax.vmap(optax.apply_updates, (None, 0))(params, updates)
    merged = jax.tree.map(np.float32, merged)
    one = jax.tree.map(lambda x: x[0], state.outer[0])
    outer = for_all(cut(params, 1).join([one]), 2)
    assert_all_close(merged, outer, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (cc.methods.get("mla"), "'mla' .* its regions come one by one"),
        (
            cc.methods.get("cocodc", delay_steps="auto"),
            "'cocodc' .* times that the host measures; give numbers; use RegionProgram",
        ),
        (cc.methods.get("dilocox"), "RankedRounds is a schedule of the host"),
        (cc.methods.get("diloco", exclude_above=3.0), "have the host restore regions"),
        (cc.methods.get("cocodc", curvature="adam_second_moment"), "pass UserInputs"),
        (cc.methods.get("snoo"), "regions=4 must be 1"),
        ("dilco", "method='dilco' is unknown"),
    ],
)
def test_unsupported_methods_are_refused_by_name(method, says):
    with pytest.raises(ValueError, match=says):
        cc.synchronized(optax.sgd(0.1), method, axis_name="region", num_regions=4)


def test_update_names_arguments_that_are_missing_or_wrong():
    params = tiny.make_params()

    def update(method, inner=ADAM, num_regions=None, update_params=params, **extra):
        tx = cc.synchronized(
            inner,
            method,
            axis_name="region",
            num_regions=num_regions,
            user_inputs=tiny.USER_INPUTS,
        )
        jax.vmap(
            lambda x: tx.update(params, tx.init(params), update_params, **extra),
            axis_name="region",
        )(jnp.zeros(3))

    by_loss, by_outputs = (
        cc.methods.get("cocodc", num_fragments=2, curvature=curvature)
        for curvature in ("hessian_vector", "gauss_newton")
    )
    by_fives = cc.methods.get("diloco", sync_interval=5)

    for method, options, says in (
        ("diloco", {"num_regions": 2}, "num_regions=2 differs from the 3 regions of"),
        ("diloco", {"update_params": None}, "needs params: tx.update"),
        ("snoo", {}, "regions=3 must be 1"),
        ("des_loc", {"inner": optax.sgd(0.1)}, "state holds none; use optax.adamw"),
        (by_loss, {}, "value_fn=lambda params: loss"),
        (by_outputs, {}, "model's outputs of the last batch: pass"),
        ("streaming_diloco", {}, "num_fragments=4 does not fit a model of 2 blocks"),
        (
            by_fives,
            {"inner": optax.MultiSteps(ADAM, 2)},
            "sync_interval=5 is not a multiple of the 2 steps",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            update(method, **options)

    with pytest.raises(ValueError, match="holds 0 states of synchronized"):
        cc.sync_metrics(ADAM.init(params))


def test_a_parameter_may_be_named_like_the_attribute_of_a_box():
    """Flax NNX passes variables to `init`, one level deeper than in `update`."""
    plain = {"attention": {"value": jnp.ones(2), "key": jnp.ones(2)}}
    boxed = jax.tree.map(nnx.Param, plain)
    fragments = [unboxed(cut(tree, 1), tree).slices[0] for tree in (plain, boxed)]
    assert [[x.path for x in slices] for slices in fragments] == [
        ["attention/key", "attention/value"]
    ] * 2
