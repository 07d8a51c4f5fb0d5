"""`scaling_laws`: known exponents, refusals, the program's files."""

import json
import math

import numpy as np
import pytest

from experiments.studies import scaling_laws

SIZES, REGIONS, INTERVALS = (1e4, 3e4, 1e5, 2e5), (1, 2, 4), (10, 40)


def grid(noise=0.0, sizes=SIZES, regions=REGIONS, intervals=INTERVALS, seed=0):
    rng = np.random.default_rng(seed)
    return [
        scaling_laws.Observation(
            {"N": n, "M": m, "H": h},
            19.2 * n**-0.1 * m**0.012 * h**0.02 * math.exp(noise * rng.normal()),
        )
        for n in sizes
        for m in regions
        for h in intervals
    ]


def test_exponents_of_a_law_without_noise_are_found():
    law = scaling_laws.fit(grid())
    assert law.names == ("N", "M", "H")
    np.testing.assert_allclose(law.scale, 19.2, rtol=1e-9)
    found = [law.exponent(name).mean for name in law.names]
    np.testing.assert_allclose(found, [-0.1, 0.012, 0.02], atol=1e-11)
    predicted, low, high = law.predict({"N": 1e9, "M": 4, "H": 40})
    np.testing.assert_allclose(
        predicted, 19.2 * 1e9**-0.1 * 4**0.012 * 40**0.02, rtol=1e-9
    )
    np.testing.assert_allclose([low, high], predicted, rtol=1e-6)


def test_intervals_hold_what_they_should():
    """Of 200 noisy data sets 95 % have the exponent inside, and a new loss."""
    true, inside, foretold = -0.1, 0, 0
    for seed in range(200):
        law = scaling_laws.fit(grid(0.02, seed=seed))
        alpha = law.exponent("N")
        inside += abs(alpha.mean - true) <= alpha.half
        new = grid(0.02, (4e5,), (4,), (40,), seed=1000 + seed)[0]
        _, low, high = law.predict(new.factors)
        foretold += low <= new.loss <= high
    assert 182 <= inside <= 198
    assert 182 <= foretold <= 198


def test_the_largest_size_is_foretold_by_the_smaller_ones():
    pairs = scaling_laws.held_out(grid())
    assert len(pairs) == len(REGIONS) * len(INTERVALS)
    np.testing.assert_allclose(*np.array(pairs).T, rtol=1e-9)


def test_what_does_not_vary_has_no_exponent():
    law = scaling_laws.fit(grid(regions=(4,), intervals=(1,)))
    assert law.names == ("N",)
    assert law.exponent("M") is None


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="several sizes"):
        scaling_laws.fit(grid(sizes=(1e4,)))
    with pytest.raises(ValueError, match="3 settings are too few for a law over N: it"):
        scaling_laws.fit(grid(sizes=SIZES[:3], regions=(1,), intervals=(1,)))
    together = [
        scaling_laws.Observation({"N": n, "M": m, "H": 10}, 2.0 / m)
        for n, m in ((1e4, 1), (2e4, 2), (4e4, 4), (8e4, 8), (16e4, 16))
    ]
    with pytest.raises(ValueError, match="vary together"):
        scaling_laws.fit(together)


def cell(method, observed, diverged=False, **others):
    factors = observed.factors
    column = {
        "loss": None if diverged else {"mean": observed.loss, "half": None},
        "parameters": factors["N"],
        "config": {"run": {"regions": factors["M"]}},
    }
    flags = {"method": method, "sync_interval": factors["H"], **others}
    return {"flags": flags, "columns": {"published": column}}


def test_the_program_writes_what_it_prints(call, tmp_path):
    cells = [cell("diloco", o) for o in grid(0.01)]
    cells += [cell("co2", o, diverged=True) for o in grid()[:6]]
    cells += [cell("data_parallel", o) for o in grid(sizes=SIZES[:2])[:1]]
    (tmp_path / "cells.json").write_text(json.dumps({"cells": cells}))
    printed, _ = call(scaling_laws, f"--workdir={tmp_path}", "--predict=1e8")
    assert "data_parallel: not fitted, a scaling law needs" in printed
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert list(found) == ["diloco"]
    alpha = found["diloco"]["exponents"]["N"]
    assert f"N^({alpha['mean']:+.4f} ± {alpha['half']:.4f})" in printed
    assert "an extrapolation, 500 times the largest" in printed
    assert abs(alpha["mean"] + 0.1) < 0.01
    assert found["diloco"]["extrapolated"]["factors"] == {"N": 1e8, "M": 4.0, "H": 40.0}
    assert len(found["diloco"]["observations"]) == 24
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.parametrize(("at", "says"), [
    (1e9, "an extrapolation, 5,000 times the largest"),
    (3e5, "an extrapolation, 1.5 times the largest"),
    (1e5, "within the sizes that were run"),
    (1e3, "an extrapolation, 0.1 times the smallest"),
])  # fmt: skip
def test_only_what_is_outside_is_an_extrapolation(at, says):
    seen = grid(0.01)
    assert says in scaling_laws.told("diloco", scaling_laws.fit(seen), seen, at)[2]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (None, "has no cells.json"),
        ([cell("diloco", grid()[0])], "has no method to fit: diloco: a scaling"),
        ([cell("diloco", o, diverged=True) for o in grid()],
         "has no method to fit: every row diverged"),
        ([cell("diloco", o, compress=c) for o in grid() for c in ("int8", "none")],
         "has no method to fit: diloco: settings differ in compress besides; keep"),
        ([{"flags": {}}], "cells.json is no cells.json of"),
    ],
    ids=["none", "one", "diverged", "two precisions", "no cells"],
)  # fmt: skip
def test_cells_that_have_no_law(cells, message, refused, tmp_path):
    if cells:
        (tmp_path / "cells.json").write_text(json.dumps({"cells": cells}))
    assert message in refused(scaling_laws, f"--workdir={tmp_path}")
    assert not (tmp_path / "scaling.json").exists()


def test_bad_flags_are_named(refused, tmp_path):
    assert "workdir=None is missing" in refused(scaling_laws)
    said = refused(scaling_laws, f"--workdir={tmp_path}", "--predict=0.5")
    assert "predict=0.5 must be" in said


def test_a_tuned_column_is_taken_before_a_published_one():
    one = cell("diloco", grid()[0])
    one["columns"]["tuned"] = one["columns"]["published"] | {
        "loss": {"mean": 1.25, "half": None}
    }
    assert scaling_laws.observations([one])["diloco"][0].loss == 1.25
