"""Flags of a run: from the fields of its configuration, and back to a configuration.

A run's configuration is its preset, changed by the flags on the command line. It is
rebuilt from them, so its checks always run. Only this file and `command_line` import
absl.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from cocodc_jax import methods as all_methods
from cocodc_jax._extras import extra
from cocodc_jax.fields import leaves_of
from cocodc_jax.methods import METHODS
from cocodc_jax.run.compile_cache import keep_programs
from cocodc_jax.run.config import command_line, effects, method_config
from cocodc_jax.run.config.elastic_flags import NOT_ELASTIC, ElasticFlags
from cocodc_jax.run.config.help import Option, Sections, by_use, options, render
from cocodc_jax.run.config.method_config import ARGUMENTS
from cocodc_jax.run.config.presets import PRESETS, with_warmup
from cocodc_jax.run.config.train_config import LEAVES, SECTIONS, TrainConfig, flat
from cocodc_jax.run.exits import STOPPED as STOPPED
from cocodc_jax.run.exits import USAGE_ERROR as USAGE_ERROR
from cocodc_jax.run.exits import as_a_command, say_once
from cocodc_jax.run.processes import Processes

with extra("train"):
    from absl import app, flags, logging

RUN_FOLDER = (
    "Folder of the run, or gs://BUCKET/RUN; an interrupted run goes on there. Default: "
    "runs/PRESET_METHOD, such as runs/tiny_cocodc."
)
ELASTIC = leaves_of("elastic", ElasticFlags)
PROCESSES = leaves_of("processes", Processes)
T = TypeVar("T")

# The program's flags; tests replace them.
FLAGS = flags.FLAGS


def define(without: Collection[str] = (), workdir: str = RUN_FOLDER) -> None:
    """Define `--preset`, `--workdir` and a flag for every leaf.

    Args:
      without: leaves that the program sets itself.
      workdir: help of `--workdir`.
    """
    rows: list[command_line.Row] = [
        ("preset", "tiny", f"Named configuration: {', '.join(PRESETS)}."),
        ("workdir", pathlib.Path, workdir),
    ]
    for name, leaf in {**PROCESSES, **ELASTIC, **LEAVES}.items():
        text = leaf.help
        if name in ELASTIC:
            default = getattr(NOT_ELASTIC, name)
            text = f"With exchange=elastic: {text} Default: {default!r}."
        if name not in without:
            rows.append((name, leaf.type, text))
    command_line.define(FLAGS, rows)


def define_fields(settings: type) -> None:
    """Define a flag for each field of a dataclass outside of the configuration."""
    leaves = leaves_of("", settings)
    rows = [(name, getattr(settings, name), leaf.help) for name, leaf in leaves.items()]
    command_line.define(FLAGS, rows)


def read(settings: type[T]) -> T:
    """Return a dataclass with the values of its flags."""
    return settings(**{name: value(name) for name in leaves_of("", settings)})


def given(name: str) -> bool:
    """Return whether the flag is on the command line."""
    return name in FLAGS and bool(FLAGS[name].present)


def value(name: str) -> Any:
    """Return the flag's value."""
    return FLAGS[name].value


def _values_given(names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the flags that are on the command line."""
    return {name: value(name) for name in names if given(name)}


def check_not_given(before: Sequence[str], nowhere: Sequence[str] = ()) -> None:
    """Refuse training flags that the calling program sets itself."""
    for name in (*before, *nowhere):
        if given(name):
            place = f", or give --{name} before --" if name in before else ""
            raise ValueError(
                f"{name}={value(name)} after -- is decided here; leave it out{place}"
            )


def processes() -> Processes:
    """Return the processes of the run, from the flags or else from a launcher."""
    settings = _values_given(PROCESSES)
    if given("region_id"):
        return Processes(**settings)  # A separate job, whatever its launcher has set.
    return Processes.from_environment(**settings)


def check_processes(configs: Iterable[TrainConfig], num_processes: int) -> None:
    """Refuse a flag that has no effect in runs of so many processes."""
    given_values = _values_given((*LEAVES, *PROCESSES))
    effects.check_processes(given_values, configs, num_processes)


def check_one_process() -> None:
    """Refuse flags for several processes or for elastic regions, and launchers."""
    for name, setting in _values_given(ELASTIC).items():
        raise ValueError(
            f"{name}={setting} is of one elastic region, and this program trains all "
            "regions; leave it out, or use experiments.train"
        )
    count = processes().num_processes
    if count != 1:
        raise ValueError(
            f"num_processes={count} is not possible: this program is one process; "
            "leave it out, or use experiments.train"
        )


def elastic() -> ElasticFlags:
    """Return the flags of elastic regions."""
    return ElasticFlags(**_values_given(ELASTIC))


def config() -> TrainConfig:
    """Return the preset, changed by the flags on the command line.

    In a program without `--method`, which trains several methods, an argument applies
    to those methods that take it. Such a program checks its flags by `check_methods`
    and `check_effects` once it knows its runs.
    """
    name = value("preset")
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; use one of {sorted(PRESETS)}")
    preset = PRESETS[name]
    leaves = with_warmup(preset, _values_given(LEAVES))

    if "method" in FLAGS:
        complete = preset.replace(**leaves)
        check_effects([complete])
        return complete

    arguments = {leaf: leaves.pop(leaf) for leaf in ARGUMENTS if leaf in leaves}
    return preset.where(**arguments).replace(**leaves)


def check_methods(methods: Iterable[str]) -> None:
    """Refuse a flag that none of the methods takes as an argument."""
    method_config.check_taken(_values_given(ARGUMENTS), methods)


def check_effects(configs: Iterable[TrainConfig]) -> None:
    """Refuse a flag that changes none of the runs."""
    effects.check(_values_given(LEAVES), list(configs))


def run_main(main: Callable[[], int | None], doc: str = "") -> None:
    """Parse the flags and call `main`; exit with its code, 2 for a wrong flag."""

    @as_a_command()
    def call(argv: Sequence[str]) -> int | None:
        logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
        say_once(logging.get_absl_handler())
        if value("help") or value("helpfull"):
            with usage_errors():
                print(help_of(doc, value("helpfull")))
            return 0
        keep_programs()
        return main()

    # Not absl's, which do not know defaults that depend on other flags.
    app.define_help_flags()
    del FLAGS.help, FLAGS.helpfull
    define_help = [(name, False, "Print this.") for name in ("help", "helpfull")]
    command_line.define(FLAGS, define_help)
    app.run(call, flags_parser=parse)


def help_of(doc: str, is_full: bool = False) -> str:
    """Return the text of `--help`, with defaults that depend on the other flags."""
    of_runs = {*PROCESSES, *ELASTIC, *LEAVES} if "preset" in FLAGS else set()
    of_program = [
        flag.name
        for flag in FLAGS.get_key_flags_for_module(command_line)
        if flag.name not in of_runs
    ]
    sections: dict[str, Iterable[Option | str]] = {"Flags": options(FLAGS, of_program)}
    if "preset" not in FLAGS:
        return render(doc, sections)

    sections["Several processes"] = options(FLAGS, PROCESSES)
    sections["Elastic regions"] = options(FLAGS, ELASTIC)
    in_full = ("",) if is_full else ()
    if given("method"):
        in_full = (*in_full, "Method:")
    sections |= _run_sections()
    return render(doc, by_use(sections, in_full))


def _run_sections() -> Sections:
    """Return the configuration's flags by section, with their present values."""
    complete = config()
    methods = list(METHODS)
    arguments: Mapping[str, Any] = dict(complete.method.where_taken)
    if "method" in FLAGS:
        methods = [complete.method.method]
        arguments = complete.method.values
    taken = {name for method in methods for name in all_methods.defaults(method)}
    values = flat(dataclasses.asdict(complete)) | arguments

    sections: dict[str, list[Option | str]] = {}
    for section, cls in SECTIONS.items():
        summary = (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
        title = f"{section.capitalize()}: {summary[:1].lower()}{summary[1:]}"
        sections[title] = []
        others = []
        for name, leaf in LEAVES.items():
            if leaf.section != section or name not in FLAGS:
                continue
            if name in ARGUMENTS and name not in taken:
                others.append(name)
            else:
                option = Option(name, values.get(name), leaf.help, leaf.choices)
                sections[title].append(option)
        if others:
            sections[title].append(
                "Arguments of other methods, which --method=NAME --help explains: "
                f"{', '.join(others)}."
            )
    return sections


def usage_errors() -> AbstractContextManager[None]:
    """Print an error of the set-up, but not of training, as one line, and exit."""
    return command_line.usage_errors(FLAGS)


def parse(argv: Sequence[str]) -> list[str]:
    """Parse a command line of a program's name and flags; return the name."""
    argv = ["--helpfull" if word == "--help=all" else word for word in argv]
    with usage_errors():
        words = FLAGS(argv)
        if len(words) > 1:
            raise ValueError(f"unexpected argument {words[1]!r}; flags begin with --")
    return words
