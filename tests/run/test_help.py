"""`--help`: sections, choices, and the values of the run."""

import re
import types

import pytest
from absl.flags import FlagValues

from cocodc_jax.methods import METHODS, defaults
from cocodc_jax.run.config import command_line, flags
from cocodc_jax.run.config.help import DEVELOPER, MAIN, Option, options, render
from cocodc_jax.run.config.method_config import ARGUMENTS
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.config.train_config import LEAVES, SECTIONS

CHOICES = {name: leaf.choices for name, leaf in LEAVES.items() if leaf.choices}


def showing(in_full, define=flags.define):
    """A program that prints its help, as `flags.run_main` does on request."""

    def main():
        with flags.usage_errors():
            print(flags.help_of("Does something.", in_full))

    return types.SimpleNamespace(__name__="program", define=define, main=main)


def define_several():
    """Of a program that trains several methods."""
    flags.define(("method",))


FULL = showing(in_full=True)
BRIEF = showing(in_full=False)
SEVERAL = showing(in_full=True, define=define_several)


def shown(text):
    """Return the flags of a help text, each with its shown value."""
    return dict(re.findall(r"^  --(\w+)(?:=(\S*))?", text, re.MULTILINE))


def test_every_flag_is_there_once_in_its_section(call):
    text, _ = call(FULL)
    assert text.startswith("Does something.\n\nFlags\n  --preset=tiny")
    titles = re.findall(r"^(\w+): ", text, re.MULTILINE)
    assert titles == [name.capitalize() for name in SECTIONS]

    others = text.partition("--method=NAME --help explains: ")[2].partition(".\n")[0]
    names = [*re.findall(r"^  --(\w+)", text, re.MULTILINE)]
    names += others.replace(",", "").split()
    of_all = {"preset", "workdir", *flags.PROCESSES, *flags.ELASTIC, *LEAVES}
    assert sorted(names) == sorted(of_all)

    assert max(map(len, text.splitlines())) <= 88


def test_the_flags_that_most_runs_set_come_first(call):
    text = call(BRIEF)[0]
    assert list(shown(text)) == ["preset", "workdir", *MAIN]

    rest = text.partition("\nFurther flags, which --help=all explains\n")[2]
    others = {*flags.PROCESSES, *flags.ELASTIC, *LEAVES} - {*MAIN}
    of_method = {name for name in others if name in defaults("cocodc")}
    named = set(re.findall(r"\w+(?=[,.])", rest))
    assert named == {n for n in others if n not in ARGUMENTS or n in of_method}
    last = rest.splitlines()[-2:]

    assert last[0].startswith("  For developers of this package: step_seconds, ")
    assert len(text.splitlines()) < 100

    # With a method, help has its arguments too; other flags are always there.
    assert "pair_pull" in shown(call(BRIEF, "--method=noloco")[0])
    in_full = call(FULL)[0]
    assert list(shown(in_full))[: len(MAIN) + 2] == ["preset", "workdir", *MAIN]
    assert list(shown(in_full))[-len(DEVELOPER) :] == list(DEVELOPER)


@pytest.mark.parametrize("preset", ["smoke", "tiny", "1b"])
def test_values_are_those_of_the_preset_and_the_method(preset, call):
    values = shown(call(FULL, f"--preset={preset}", "--method=diloco")[0])

    config = PRESETS[preset].replace(method="diloco")
    for name in ("steps", "width", "inner_lr", "sequence_length"):
        section = getattr(config, LEAVES[name].section)
        assert values[name] == str(getattr(section, name))
    assert values["sync_interval"] == str(config.method.values["sync_interval"])
    assert "mixing_alpha" not in values


def test_values_on_the_command_line_are_shown(call):
    words = ("--steps=70", "--method=streaming_diloco", "--noscan_layers")
    values = shown(call(FULL, *words)[0])
    assert (values["steps"], values["scan_layers"]) == ("70", "false")
    assert values["mixing_alpha"] == "0.5"


def test_arguments_of_several_methods_are_all_explained(call):
    values = shown(call(SEVERAL, "--preset=tiny")[0])
    assert values.keys() >= {name for method in METHODS for name in defaults(method)}
    # A value for all methods is shown; defaults of methods, which differ, are not.
    assert (values["sync_interval"], values["outer_lr"]) == ("40", "")


def test_a_program_without_runs_may_have_a_flag_of_a_field_s_name(call):
    def define():
        rows = [("regions", 4, "Regions that train."), ("cases", "gpt", "Models.")]
        command_line.define(flags.FLAGS, rows)

    assert shown(call(showing(in_full=True, define=define))[0]) == {
        "regions": "4",
        "cases": "gpt",
    }


def test_a_wrong_flag_next_to_help_is_refused(refused):
    assert refused(FULL, "--preset=tinny").startswith("--preset='tinny' is unknown")


# How fragments are cut is checked against the model, units against the curvature.
LATER = {"fragment_strategy", "curvature_units"}


@pytest.mark.parametrize("name", sorted(CHOICES.keys() - LATER))
def test_choices_are_those_that_are_checked(name):
    taking = [m for m in ("cocodc", *METHODS) if name in defaults(m)]
    leaves = {"method": taking[0]} if taking else {}
    with pytest.raises(ValueError, match="'nonsense' is unknown") as raised:
        PRESETS["smoke"].replace(**leaves | {name: "nonsense"})
    assert all(f"'{choice}'" in str(raised.value) for choice in CHOICES[name])


def test_the_text_of_an_option_follows_its_value_or_is_below_it():
    text = render("Doc.", {"A": [Option("n", 1, "a number", ("1", "2")), "Said."]})
    assert text == "Doc.\n\nA\n  --n=1" + " " * 21 + "a number. One of 1, 2.\n  Said."
    long = str(Option("a_rather_long_name", "value", "what it is."))
    assert long.splitlines() == [
        "  --a_rather_long_name=value",
        " " * 28 + "what it is.",
    ]


def test_help_has_the_full_text_and_choices_once():
    values = FlagValues()
    rows = [
        ("seeds", 1, "runs: 0, 1, ..."),
        ("fault", (None, "cut", "loss"), "of the network"),
    ]
    command_line.define(values, rows)

    seeds, fault = map(str, options(values, ("seeds", "fault")))
    assert seeds.split(maxsplit=1) == ["--seeds=1", "runs: 0, 1, ..."]
    assert fault.split(maxsplit=1) == ["--fault", "of the network. One of cut, loss."]
