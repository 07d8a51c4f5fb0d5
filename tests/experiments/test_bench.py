"""The benchmark's contenders train the same, and its figures are correct."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from experiments import bench
from experiments.benchmarks import cases, contenders
from experiments.benchmarks.cases import Gpt


@pytest.fixture(scope="module")
def case():
    """Linear regression of two regions, 8 steps a turn."""

    def loss_fn(params, tokens, key):
        del key
        x = tokens[:, :-1].astype(jnp.float32)
        y = tokens[:, -1]
        return jnp.square(x @ params["w"] - y).mean(), {}

    batches = np.random.default_rng(0).integers(0, 3, (8, 2, 4, 4), np.int32)
    params = {"w": jnp.arange(3.0)}
    return cases.Case("linear", loss_fn, optax.adam(0.1), params, batches)


def trained(turn):
    turn()
    return jax.tree.map(np.asarray, turn())


def test_tokens_of_a_turn_are_those_of_all_regions(case):
    assert (case.interval, case.regions) == (8, 2)
    assert case.tokens == 8 * 2 * 4 * 3


@pytest.mark.parametrize("num_devices", [1, 2])
def test_scans_without_sync_are_plain_loops(case, num_devices):
    loops = trained(contenders.plain_loops(case))
    alone = trained(contenders.scan_alone(case, num_devices))
    stacked = np.stack([region["w"] for region in loops])
    np.testing.assert_allclose(alone["w"], stacked, rtol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_contenders_train_what_diloco_here_trains(case, num_devices):
    ours = trained(contenders.region_program(case, "diloco", num_devices))
    one = trained(contenders.transform(case, "diloco", num_devices))
    np.testing.assert_allclose(one["w"], ours["w"], rtol=1e-5)
    pytest.importorskip("drjax")
    theirs = trained(contenders.drjax_diloco(case, num_devices))
    for region in ours["w"]:
        np.testing.assert_allclose(region, theirs["w"], rtol=1e-5)


def test_the_loop_of_pytorch_trains_what_diloco_here_trains():
    pytest.importorskip("torch")
    gpt = Gpt(vocab_size=16, length=8, width=16, num_layers=2, num_heads=2)
    batches = np.random.default_rng(0).integers(0, 16, (8, 2, 4, 9), np.int32)
    params = gpt.init(jax.random.key(0))
    adamw = optax.adamw(1e-3)
    case = cases.Case("gpt", gpt.loss_fn(), adamw, params, batches, gpt)

    theirs = trained(contenders.torch_diloco(case))
    ours = trained(contenders.region_program(case, "diloco", 1))

    # Adam divides by a gradient's size, so that rounding of small ones shows.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x[0], y, atol=1e-4), ours, theirs
    )


@pytest.mark.parametrize("is_there", [True, False])
def test_a_loop_of_pytorch_is_shown_where_it_is_installed(monkeypatch, case, is_there):
    gpt = dataclasses.replace(case, gpt=Gpt())
    monkeypatch.setattr(bench, "METHODS", {})
    monkeypatch.setattr(bench, "TRANSFORMS", {})
    monkeypatch.setattr(
        bench.importlib.util, "find_spec", lambda name: is_there and name == "torch"
    )
    monkeypatch.setattr(contenders, "torch_diloco", contenders.plain_loops)

    console = Console(width=150)
    with console.capture() as shown:
        bench.compare(gpt, 1, 1, console)
    assert ("over torch" in shown.get()) == is_there
    assert ("PyTorch is not installed" in shown.get()) != is_there
    assert "A ratio of 2 is twice as fast." in shown.get()

    with console.capture() as shown:
        bench.compare(gpt, 1, 1, console, ["plain loops"])
    assert "PyTorch" not in shown.get()


def test_contenders_take_turns_and_are_compared(monkeypatch):
    order = []
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def maker(name, seconds):
        def turn():
            order.append(name)
            now[0] += next(seconds)

        return lambda: turn

    timings = bench.take_turns(
        {
            "drjax": maker("drjax", iter([9.0, 1.0, 2.0, 4.0, 6.0])),
            "ours": maker("ours", iter([5.0, 1.0, 1.0, 4.0, 2.0])),
        },
        rounds=3,
    )

    assert order == ["drjax", "ours"] * 5
    assert timings["ours"].median_s == 2
    assert timings["ours"].compile_s == 3
    assert timings["ours"].ratios(timings["drjax"]) == [1, 2, 3]

    console = Console(width=120)
    with console.capture() as shown:
        console.print(bench.speeds("case", 40_000, timings))
    rows = [line.split() for line in shown.get().splitlines()]
    (ours,) = (row for row in rows if row[:1] == ["ours"])
    assert ours == ["ours", "2.00", "20.00", "10.00,", "40.00", "3.0"]


def test_the_gpt_has_its_documented_size():
    params = jax.eval_shape(Gpt().init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == 837_888


def test_torch_alone_has_one_case(refused, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda _: True)
    error = refused(bench, "--contenders=torch", "--cases=gpt,smoke")
    assert error == "--contenders=torch trains the case gpt alone; use --cases=gpt"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cases=huge"], "cases='huge' is unknown"),
        (["--repeats=0"], "repeats=0 must be at least 1"),
        (["--interval=4"], "interval=4 must be a multiple of 4 and at least 8"),
        (["--devices=3"], "devices=3 does not divide regions=4 evenly"),
        (["--regions=16", "--devices=1,16"], "devices=16 is more than there are; use"),
        (["--devices=a"], "devices=a must be whole numbers separated by commas"),
        (["--cases="], "cases= is empty"),
        *(
            (
                ["--cases=", "--growth=regions", f"--{word}"],
                f"{word} is for cases, but cases= is empty; --growth has its own",
            )
            for word in ("devices=2", "regions=16", "contenders=torch")
        ),
        (["--contenders=drjax"], "contenders='drjax' is not installed"),
        (["--growth=width"], "growth='width' is unknown"),
        (["--contenders=diloco,jax"], "contenders='jax' is unknown; use some of dilo"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(refused, monkeypatch, words, says):
    monkeypatch.setattr(bench.cc, "use_cpu_devices", lambda _: None)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda _: None)
    assert says in refused(bench, *words)


@pytest.mark.parametrize(
    ("words", "layouts"),
    [
        ([], [1, 4]),
        (["--regions=1"], [1]),
        (["--devices=2,2,1"], [2, 1]),
        (["--regions=16"], [1]),  # As where there is one GPU.
    ],
)
def test_layouts_are_those_that_there_are_devices_for(
    call, monkeypatch, case, words, layouts
):
    shown = []
    monkeypatch.setattr(bench.cc, "use_cpu_devices", lambda _: None)
    monkeypatch.setattr(bench, "make_case", lambda *_: case)
    monkeypatch.setattr(bench, "compare", lambda _, n, *__: shown.append(n))
    call(bench, "--cases=smoke", *words)
    assert shown == layouts


def test_growth_names_the_quantity_that_grows(monkeypatch):
    monkeypatch.setattr(bench, "_maker", lambda *_: lambda: lambda: None)

    console = Console(width=150)
    with console.capture() as shown:
        for name in bench.GROWTHS:
            bench.show_growth(name, 8, 3, console)

    assert "cocodc of smoke: all regions on one device, H 8" in shown.get()
    assert "with 32 layers: 4 regions on 4 devices, H 40" in shown.get()
    assert "diloco of gpt: 4 regions on 4 devices, H 8" in shown.get()
    assert "Rounds: 3, medians of them. A ratio of 2 takes" in shown.get()


def test_every_contender_of_a_case_is_shown(call, monkeypatch, case):
    monkeypatch.setattr(bench.cc, "use_cpu_devices", lambda _: None)
    monkeypatch.setattr(bench, "make_case", lambda *_: case)
    monkeypatch.setattr(bench, "METHODS", {"diloco": {}})
    monkeypatch.setattr(bench, "TRANSFORMS", {"transform": "diloco"})
    monkeypatch.setattr(bench, "GROWTHS", {"regions": (1, 2)})
    region_program = functools.partial(contenders.region_program, case, "diloco", 1)
    monkeypatch.setattr(bench, "_maker", lambda *_: region_program)

    out, _ = call(
        bench, "--cases=smoke", "--regions=2", "--repeats=1", "--growth=regions"
    )

    for name in ("diloco", "transform", "scan alone", "plain loops", "over 1 regions"):
        assert name in out

    words = ["--cases=smoke", "--regions=2", "--repeats=1", "--devices=1"]
    out, _ = call(bench, *words, "--contenders=scan alone,plain loops")
    assert "scan alone" in out
    assert "diloco" not in out
