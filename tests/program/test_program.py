"""The region program: donation, copies, compilation, batches, bad input."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from cocodc_jax import methods
from cocodc_jax.core.state import TrainState
from cocodc_jax.engine import placement
from cocodc_jax.engine.mesh import make_mesh, outer_device
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync import cutting, merge
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.train.run_steps import MAX_SCAN_STEPS
from cocodc_jax.train.run_steps import run_steps as run
from tests.numerics import assert_within_ulps
from tests.program import tiny


def stacked(first, last):
    """Batches of the steps `first` to `last` - 1, leaves `[T, R, ...]`."""
    return jax.tree.map(
        lambda *x: np.stack(x), *map(tiny.make_batch, range(first, last))
    )


def trained(program):
    """Return the end of a run of 12 steps."""
    state, outputs = tiny.finish(program, tiny.start(program), 12)
    losses = np.concatenate([output.losses for output in outputs])
    syncs = [tiny.host(sync) for output in outputs for sync in output.syncs]
    return tiny.numbers(state), losses, syncs


class TestArrays:
    def test_old_regions_and_applied_outer_fragments_are_donated(self, method_name):
        program = tiny.shared_program(method_name)
        old = tiny.start(program)
        for new, output in run(program, old, tiny.stream(), 12):
            assert all(x.is_deleted() for x in jax.tree.leaves(old.region))

            applied = {sync.fragment_id for sync in output.syncs}
            outer = old.sync.outer if old.sync else ()
            for k, arrays in enumerate(zip(*outer, strict=True)):
                for x in jax.tree.leaves(arrays):
                    assert x.is_deleted() == (k in applied)

            kept = new.region, new.sync and new.sync.outer
            assert not any(x.is_deleted() for x in jax.tree.leaves(kept))
            old = new

    @pytest.mark.parametrize("outer_place", ["spare", "mesh"])
    @pytest.mark.parametrize("name", ["streaming_diloco", "diloco"])
    def test_the_callers_arrays_survive(self, monkeypatch, outer_place, name):
        """What goes into `init` and what `outer_params` gave, after later syncs.

        Also where the outer state shares a device with the regions: there a copy
        between shardings would be none, and donation would delete it.
        """
        mesh = make_mesh(4, devices=jax.devices()[:1])
        if outer_place == "spare":
            monkeypatch.setattr(placement, "is_one_cpu", lambda mesh: False)
        program = tiny.make_program(name, mesh)

        for device in (mesh.devices.flat[0], outer_device(mesh)):
            params = jax.device_put(tiny.make_params(), device)
            state = program.init(params, jax.random.key(0))
            outer = program.outer_params(state)
            mean = program.mean_params(state)

            tiny.finish(program, state, 12)

            tiny.assert_same(tiny.host(params), tiny.make_params())
            tiny.assert_same(tiny.host(outer), tiny.make_params())
            tiny.assert_same(tiny.host(mean), tiny.make_params())

    def test_outer_state_is_one_copy_on_one_device_outside_the_mesh(self, method_name):
        program = tiny.shared_program(method_name)
        state, _ = tiny.finish(program, tiny.start(program), 8)
        spare = outer_device(program.mesh)
        assert spare not in program.mesh.devices

        if method_name == "data_parallel":
            assert state.sync is None
            return
        where = {x.sharding for x in jax.tree.leaves(state.sync.outer)}
        assert where == {SingleDeviceSharding(spare)}

        outer_bytes = sum(x.nbytes for x in jax.tree.leaves(state.sync.outer.params))
        assert outer_bytes == sum(program.fragments.num_bytes)

    @pytest.mark.parametrize("exchange", ["program", "outer"])
    def test_the_outer_state_of_regions_of_one_cpu_is_on_the_device_of_its_exchange(
        self, exchange
    ):
        """On the regions' device for an exchange in the program, else the outer one."""
        mesh = make_mesh(4, devices=jax.devices()[:1])
        program = tiny.make_program(
            "streaming_diloco", mesh, transport=Transport(exchange)
        )

        outer = jax.tree.leaves(tiny.start(program).sync.outer)

        beside = mesh.devices.flat[0] if exchange == "program" else outer_device(mesh)
        assert {device for x in outer for device in x.devices()} == {beside}

    @pytest.mark.parametrize("name", ["cocodc_hessian", "diloco"])
    def test_the_placement_of_the_outer_state_changes_no_number(
        self, monkeypatch, name
    ):
        """Nor does it matter that events there are among the inner steps."""
        mesh = make_mesh(4, devices=jax.devices()[:1])
        beside = trained(tiny.make_program(name, mesh))
        monkeypatch.setattr(placement, "is_one_cpu", lambda mesh: False)
        apart = trained(tiny.make_program(name, mesh))
        assert_within_ulps(beside, apart)

    def test_bfloat16_parameters_have_float32_outer_ones(self):
        program, state, _ = trained_narrow(tiny.METHODS["streaming_diloco"], 8)
        dtypes = [x.dtype for x in jax.tree.leaves(state.sync.outer)]
        assert set(dtypes) == {jnp.dtype("float32")}
        # Messages are float32 pseudo-gradients: four syncs of half the model.
        assert state.bytes_sent == 4 * sum(program.fragments.num_params) * 2

        mean = program.mean_params(state)["head"]
        local = state.region.params["head"]
        assert mean.dtype == local.dtype == jnp.bfloat16

        expected = np.float32(local).mean(0).astype(jnp.bfloat16)
        np.testing.assert_array_equal(mean, expected)

    def test_bfloat16_gradients_are_averaged(self):
        """In float32 on the way: XLA's CPU backend aborts on a bfloat16 all-reduce."""
        _, _, (output,) = trained_narrow(methods.get("data_parallel"), 2)
        assert np.isfinite(output.losses).all()


def trained_narrow(method, num_steps):
    """A program of bfloat16 parameters, and its last state."""
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tiny.make_params())
    program = tiny.program_of(method, optimizer=optax.sgd(0.1), params=narrow)
    state = program.init(narrow, jax.random.key(0))
    return program, *tiny.finish(program, state, num_steps)


def test_bfloat16_training_needs_no_implicit_promotion():
    def loss_fn(params, batch, key):
        return jnp.mean((params["w"][None] - batch) ** 2), {}

    method = methods.get(
        "streaming_diloco", sync_interval=2, num_fragments=1, delay_steps=1
    )
    params = {"w": jnp.zeros(3, jnp.bfloat16)}
    batches = itertools.repeat(np.ones((2, 4, 3), jnp.bfloat16))
    with jax.numpy_dtype_promotion("strict"):
        program = RegionProgram(loss_fn, optax.sgd(0.1), method, params, 2)
        state = program.init(params, jax.random.key(0))
        state, _ = tiny.follow(program, state, batches, 4)
        mean = program.mean_params(state)

    assert mean["w"].dtype == jnp.bfloat16
    assert np.all(mean["w"] > 0)


class TestCompilation:
    def test_no_program_is_compiled_after_the_first_cycle(self, method_name):
        program = tiny.shared_program(method_name)
        state, _ = tiny.finish(program, tiny.start(program), 12)
        with tiny.compilations() as compiled:
            for _ in range(2):
                state, _ = tiny.finish(program, state, 12)
            tiny.start(program)
        assert not compiled

    @pytest.mark.parametrize(
        ("name", "length"),
        [
            ("data_parallel", 4),
            ("diloco", 4),
            ("streaming_diloco", 4),
            ("streaming_diloco", 1),
        ],
    )
    def test_no_array_is_transferred_implicitly(self, name, length):
        """A single device otherwise takes host batches in with its other arguments."""
        program = tiny.shared_program(name)
        if length == 1:
            program = tiny.sharded_program(name, 1, 1, 1)
        tiny.finish(program, tiny.start(program), 12)

        state = tiny.start(program)
        with jax.transfer_guard("disallow"):
            tiny.finish(program, state, 12)
            with pytest.raises(RuntimeError, match="Disallowed"):
                jax.jit(jnp.sin)(np.ones(3))

    def test_advance_waits_for_no_device(self):
        """Steps on a batch that takes a second to make are handed out at once."""

        @jax.jit
        def make_slowly(batch, matrix):
            matrix = jax.lax.fori_loop(0, 20_000, lambda _, x: x @ x, matrix)
            return batch + matrix[None, :1, :3]

        def loss_fn(params, batch, key):
            return jnp.mean((params["w"] - batch) ** 2), {}

        method = methods.get(
            "streaming_diloco", sync_interval=2, num_fragments=1, delay_steps=1
        )

        params = {"w": jnp.ones(3)}
        batch = jnp.zeros((1, 1, 3))
        program = RegionProgram(loss_fn, tiny.OPTIMIZER, method, params, 1)
        state = program.init(params, jax.random.key(0))

        for _ in range(4):
            state, _ = program.advance(state, batch)

        slow = make_slowly(batch, jnp.zeros((128, 128)))
        handed_out = []
        for next_batch in (slow, batch, batch, batch):
            state, output = program.advance(state, next_batch)
            handed_out.append(output.losses)
            # The sync at step 5 started at 4, before the slow batch; that at 7 after.
            handed_out += [s.norm for s in output.syncs if s.start_step > 4]

        is_ready = [x.is_ready() for x in handed_out]
        jax.block_until_ready((state.region, state.sync.outer))
        assert is_ready == [False] * 5


class TestBatches:
    @pytest.mark.parametrize("ahead", [None, 500])
    def test_long_stretches_without_events_are_scanned_in_parts(self, ahead):
        def advance(state, batches):
            return TrainState(None, step=state.step + len(batches)), len(batches)

        program = types.SimpleNamespace(steps_to_event=lambda _: ahead, advance=advance)
        steps = run(program, TrainState(None), itertools.repeat(np.zeros(1)), 201)
        assert MAX_SCAN_STEPS == 100
        assert [taken for _, taken in steps] == [100, 100, 1]

    def test_batches_may_be_on_the_mesh_already(self):
        program = tiny.shared_program("diloco")
        on_host = stacked(0, 2)
        on_mesh = jax.device_put(on_host)

        expected, _ = program.advance(tiny.start(program), on_host)
        state, _ = program.advance(tiny.start(program), on_mesh)
        tiny.assert_same(tiny.numbers(state), tiny.numbers(expected))


def test_a_merge_has_a_key_that_no_inner_step_has():
    def apply(local, staged, outer, *, delay_steps, key):
        return outer, {"draw": jax.random.key_data(key)[1]}

    method = methods.get(
        "streaming_diloco", sync_interval=2, num_fragments=2, delay_steps=2
    ).with_sync(merge=merge.Merge("draws", apply, needs=frozenset({"key"})))
    program = tiny.program_of(method)
    _, outputs = tiny.finish(program, tiny.start(program), 8)
    draws = [o.aux["draw"] for o in outputs]
    draws += [s.metrics["draw"][None] for o in outputs for s in o.syncs]
    draws = np.concatenate(draws)

    assert len(draws) == 8 + 6
    assert len(np.unique(draws)) == draws.size


COCODC = {"method": tiny.METHODS["cocodc"]}
GAUSS_NEWTON = {
    "method": methods.get(
        "cocodc", curvature="gauss_newton", curvature_units="gradient", num_fragments=2
    )
}
NO_INPUTS = {"user_inputs": UserInputs()}
ONES = jnp.ones(2)
ADAM_OF_SOME = optax.partition(
    {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)},
    {"embed": "adam", "blocks": "sgd", "head": "sgd"},
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regions": 3, "mesh": make_mesh(2)}, "regions=3 is not a multiple .* 2"),
        *(
            ({"regions": num}, f"regions={num} must be .*at least 1")
            for num in (0, 2.0, None)
        ),
        ({"params": {}}, "params has no arrays"),
        ({"params": {"a/b": ONES, "a": {"b": ONES}}}, "two leaves whose path is 'a/b'"),
        ({"params": {"w": 1j * ONES}}, "'w' of dtype complex64: pass its"),
        ({"fragments": cutting.cut(tiny.make_params(), 2)}, "2 entries.*fragments=1"),
        ({"method": methods.get("streaming_diloco")}, "num_fragments=4 .* 2 blocks"),
        (COCODC | NO_INPUTS, r"needs .learning_rate.: pass UserInputs\(learning_rate"),
        (GAUSS_NEWTON | NO_INPUTS, r"needs 'model_fn': pass UserInputs\(outputs"),
        (COCODC | {"user_inputs": UserInputs(0.1)}, r"=adam_second_moment\(b2\)"),
        (COCODC, "holds 0 Adam states"),
        (COCODC | {"optimizer": ADAM_OF_SOME}, "leaves some to others"),
    ],
)
def test_invalid_arguments_of_a_program_are_refused(options, message):
    options = {"method": methods.get("diloco"), "optimizer": optax.sgd(0.1)} | options
    with pytest.raises(ValueError, match=message):
        tiny.program_of(**options)


def test_a_number_of_regions_may_be_numpys():
    diloco = methods.get("diloco")
    assert tiny.program_of(diloco, regions=np.int64(4)).num_regions == 4


def test_a_loss_without_aux_is_refused():
    bare = lambda params, batch, key: tiny.loss_fn(params, batch, key)[0]  # noqa: E731
    program = tiny.make_program("diloco", loss=bare)
    with pytest.raises(ValueError, match=r"loss_fn must return \(loss, aux\)"):
        tiny.finish(program, tiny.start(program), 1)


def test_steps_past_an_event_are_refused():
    program = tiny.shared_program("diloco")
    state = tiny.start(program)
    assert program.steps_to_event(state) == 2
    why = "3 steps lead past the next event, which is 2"
    with pytest.raises(ValueError, match=why):
        program.advance(state, stacked(0, 3))


def test_batches_that_end_early_are_named():
    program = tiny.shared_program("diloco")
    batches = map(tiny.make_batch, range(3))
    with pytest.raises(ValueError, match="ended at step 3, before .* step 4"):
        tiny.follow(program, tiny.start(program), batches, 8)
