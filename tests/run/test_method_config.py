"""A method and its arguments: accepted and refused values, files old and new."""

import json
import math
import re
from typing import Literal

import pytest

import cocodc_jax as cc
from cocodc_jax.fields import COUNT_OR_WORD, leaf_type
from cocodc_jax.run.config import method_config
from cocodc_jax.run.config.method_config import ARGUMENTS, MethodConfig, check_taken
from cocodc_jax.run.config.presets import PRESETS


def test_an_argument_that_the_method_does_not_take_is_refused():
    with pytest.raises(
        ValueError,
        match="mixing_alpha=0.5 has no meaning for diloco, which takes sync_interval, "
        "outer_lr, outer_momentum, router_interval, compress, .*; leave it out",
    ):
        MethodConfig("diloco", {"mixing_alpha": 0.5})

    with pytest.raises(ValueError, match="mixing_alpha=0.5 has no meaning for diloco"):
        MethodConfig("streaming_diloco", {"mixing_alpha": 0.5}).replace("diloco")


def test_an_argument_that_no_method_takes_is_refused():
    with pytest.raises(ValueError, match="ranck=4 is no argument of any method"):
        MethodConfig("diloco", where_taken={"ranck": 4})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(value):
    message = re.escape(f"outer_lr={value} must be a finite number")
    with pytest.raises(ValueError, match=message):
        MethodConfig("diloco", {"outer_lr": value})
    with pytest.raises(ValueError, match=message):
        MethodConfig("data_parallel").where(outer_lr=value)


def test_a_limit_may_be_infinite_but_not_nan():
    assert MethodConfig("diloco", {"exclude_above": math.inf})
    assert MethodConfig("co2", {"momentum_clip": math.inf})
    with pytest.raises(ValueError, match="exclude_above=nan must be a finite number"):
        MethodConfig("diloco", {"exclude_above": math.nan})


def test_an_argument_that_none_of_several_methods_takes_is_refused():
    check_taken({"mixing_alpha": 0.5}, ["diloco", "streaming_diloco"])
    with pytest.raises(
        ValueError, match="rank=8 has no meaning for diloco, cocodc, which take sync_"
    ):
        check_taken({"rank": 8}, ["diloco", "cocodc"])


def test_where_taken_gives_arguments_to_methods_that_take_them():
    both = {"num_fragments": 2, "outer_lr": 0.1}
    config = MethodConfig("diloco", {"outer_lr": 0.3}, both)
    assert config.values["outer_lr"] == 0.3
    assert "num_fragments" not in config.values
    streaming = config.replace("streaming_diloco")
    assert streaming.build().num_fragments == 2
    assert streaming.values["outer_lr"] == 0.3
    assert config.where(outer_momentum=0.5).values["outer_momentum"] == 0.5


def test_equal_configurations_are_equal_and_have_one_hash():
    one = MethodConfig(
        "diloco", {"outer_lr": 0.3, "sync_interval": 9, "compress": None}
    )
    other = MethodConfig("diloco", (("sync_interval", 9), ("outer_lr", 0.3)))
    assert one == other
    assert hash(one) == hash(other)
    assert one.resolve() == one.resolve().resolve() != one
    assert one.resolve().values == one.values


def test_a_preset_sets_only_arguments_of_its_own_method():
    """But for `rank`, which is for small models in whichever method has one."""
    for preset in PRESETS.values():
        names = {name for name, _ in preset.method.where_taken}
        assert names - set(preset.method.values) <= {"rank"}
        assert not preset.method.given


@pytest.mark.parametrize("method", cc.methods.METHODS)
def test_a_run_s_file_is_flat_and_reads_again(method):
    leaves = {"regions": cc.methods.get(method).num_regions or 4}
    config = PRESETS["smoke"].replace(method=method, **leaves).method.resolve()
    value = json.loads(json.dumps(config.to_json()))
    assert value["method"] == method
    assert value.keys() - {"method"} <= set(cc.methods.defaults(method))
    assert MethodConfig.from_json(value).resolve() == config


def test_a_file_of_an_earlier_version_reads():
    """It has every argument of every method: null, the preset's, or the method's."""
    old = dict.fromkeys(ARGUMENTS) | {
        "method": "diloco",
        "sync_interval": 16,
        "num_fragments": 4,
        "delay_steps": 2,
        "rank": 8,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "outer_placement": "host",
        "an_argument_that_is_gone": None,
    }

    config = PRESETS["smoke"].replace(method="diloco").method
    assert MethodConfig.from_json(old).resolve() == config.resolve()
    with pytest.raises(ValueError, match=r"section 'method'.*'an_argument_that_is_g"):
        MethodConfig.from_json(old | {"an_argument_that_is_gone": 3})


def mine(
    sync_interval: int = 10,
    boldness: "float | None" = None,
    mood: "Literal['calm', 'brave'] | None" = None,
):
    """A method that a user adds.

    Args:
      sync_interval: H.
      boldness: how far a region goes, from 0 to 1; None is 0.5, which
        did best.
      mood: calm regions wait.

    Returns:
      The method.
    """
    return cc.methods.get("diloco", sync_interval=sync_interval)


def test_a_new_method_s_arguments_are_known_from_its_function():
    leaves = method_config.method_leaves({**cc.methods.METHODS, "mine": mine})
    assert leaves.keys() - ARGUMENTS.keys() == {"boldness", "mood"}
    leaf = leaves["boldness"]
    assert leaf.type is float
    assert leaf.help == (
        "how far a region goes, from 0 to 1; None is 0.5, which did best. For mine."
    )


def test_words_of_an_argument_are_those_of_its_type():
    leaf = method_config.method_leaves({"mine": mine})["mood"]
    assert leaf.type is str
    assert leaf.choices == ("calm", "brave")


def test_help_names_the_methods_where_they_are_few():
    assert "For cocodc (0.3), cocodc_paper (0.5)." in (
        ARGUMENTS["compensation_strength"].help
    )
    assert ARGUMENTS["compress"].help.endswith("For most methods.")
    taking = [m for m in cc.methods.METHODS if "outer_lr" in cc.methods.defaults(m)]
    assert ARGUMENTS["outer_lr"].help.endswith(f"For {len(taking)} methods.")
    assert ARGUMENTS["outer_placement"].type is str


def silent(zeal: int = 1):
    """A method."""


def untyped(zeal=1):
    """A method.

    Args:
      zeal: of it.
    """


@pytest.mark.parametrize(
    ("method", "why"), [(silent, "is not documented"), (untyped, "has no type")]
)
def test_an_argument_without_explanation_or_type_is_refused(method, why):
    name = method.__name__
    with pytest.raises(ValueError, match=f"'zeal' of method '{name}' {why}"):
        method_config.method_leaves({name: method})


def test_a_flag_has_the_type_of_its_annotation():
    assert leaf_type(int, int | None) is int
    assert leaf_type(int | str | None) == leaf_type(str, int) == COUNT_OR_WORD
    assert leaf_type(str | cc.methods.Method) is str


@pytest.mark.parametrize("annotations", [(int, float), (list,), (bool, str)])
def test_annotations_without_a_flag_type_are_refused(annotations):
    with pytest.raises(ValueError, match="no flag can be made for"):
        leaf_type(*annotations)
