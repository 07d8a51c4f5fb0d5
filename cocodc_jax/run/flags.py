"""Flags from the configuration's leaves, and actionable errors.

Only this file and `flag_types` import absl. A run's configuration is its preset with
the flags that were given; it is rebuilt from them, so its own checks always run.
"""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from cocodc_jax import methods as all_methods
from cocodc_jax._extras import MissingExtraError, extra
from cocodc_jax.fields import leaves_of
from cocodc_jax.methods import METHODS
from cocodc_jax.run import effects, flag_types, method_config, optimizer_config
from cocodc_jax.run.compile_cache import keep_programs
from cocodc_jax.run.config import LEAVES, SECTIONS, TrainConfig
from cocodc_jax.run.elastic_flags import NOT_ELASTIC, ElasticFlags
from cocodc_jax.run.help import Option, Sections, by_use, options, render
from cocodc_jax.run.messages import STOPPED as STOPPED
from cocodc_jax.run.messages import USAGE_ERROR as USAGE_ERROR
from cocodc_jax.run.messages import as_a_command, refuse, say_once
from cocodc_jax.run.method_config import ARGUMENTS
from cocodc_jax.run.presets import PRESETS, with_warmup
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


def define_one(kind: Any, name: str, default: Any, text: str, **settings: Any) -> None:
    """Define one more flag of the program, see `flag_types.define`."""
    flag_types.define(kind, name, default, text, FLAGS, **settings)
    # `--help` shows the key flags of the program.
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])


def define(without: Collection[str] = (), workdir: str = RUN_FOLDER) -> None:
    """Define `--preset`, `--workdir` and a flag for every leaf."""
    define_one(str, "preset", "tiny", f"Named configuration: {', '.join(PRESETS)}.")
    define_one(pathlib.Path, "workdir", None, workdir)
    for name, leaf in PROCESSES.items():
        define_one(leaf.flag_type, name, None, leaf.help)
    for name, leaf in ELASTIC.items():
        default = getattr(NOT_ELASTIC, name)
        text = f"With exchange=elastic: {leaf.help} Default: {default!r}."
        define_one(leaf.flag_type, name, None, text)
    for name, leaf in LEAVES.items():
        if name not in without:
            define_one(leaf.flag_type, name, None, leaf.help)


def define_fields(settings: type) -> None:
    """Define a flag for each field of a dataclass outside of the configuration."""
    for name, leaf in leaves_of("", settings).items():
        define_one(leaf.flag_type, name, getattr(settings, name), leaf.help)


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
    """Return the values of those flags that are on the command line."""
    return {name: value(name) for name in names if given(name)}


def check_not_given(before: Sequence[str], nowhere: Sequence[str] = ()) -> None:
    """Refuse training flags that the program that starts the training sets itself."""
    for name in (*before, *nowhere):
        if given(name):
            place = f", or give --{name} before --" if name in before else ""
            raise ValueError(
                f"{name}={value(name)} after -- is decided here; leave it out{place}"
            )


def processes() -> Processes:
    """Return which processes take part: the flags, over what a launcher has set."""
    settings = _values_given(PROCESSES)
    if given("region_id"):
        return Processes(**settings)  # A separate job, whatever its launcher has set.
    return Processes.from_environment(**settings)


def check_processes(configs: Iterable[TrainConfig], num_processes: int) -> None:
    """Refuse a flag that has no effect in runs of so many processes."""
    effects.check_processes(
        _values_given((*LEAVES, *PROCESSES)), configs, num_processes
    )


def check_one_process() -> None:
    """Refuse flags or a launcher of several processes, and of an elastic region."""
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


def config(
    without: Collection[str] = (),
    methods: Iterable[str] | None = None,
    **replaced: Any,
) -> TrainConfig:
    """Return the preset with the flags given.

    Args:
      without: leaves that are not taken from flags.
      methods: of a program that trains several; arguments then hold for those that take
        them.
      **replaced: leaves that the program sets itself.
    """
    name = value("preset")
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; use one of {sorted(PRESETS)}")
    preset = PRESETS[name]
    leaves = _values_given(leaf for leaf in LEAVES if leaf not in without)
    leaves = with_warmup(preset, leaves | replaced)

    if methods is None:
        complete = preset.replace(**leaves)
        check_optimizers([complete])
        return complete

    check_methods(methods)
    arguments = {leaf: leaves.pop(leaf) for leaf in ARGUMENTS if leaf in leaves}
    return preset.where(**arguments).replace(**leaves)


def check_methods(methods: Iterable[str]) -> None:
    """Refuse a flag that is an argument of other methods only."""
    method_config.check_taken(_values_given(ARGUMENTS), methods)


def check_optimizers(configs: Iterable[TrainConfig]) -> None:
    """Refuse a flag that no inner optimizer of the runs uses, or without an effect."""
    configs = list(configs)
    leaves = _values_given(LEAVES)
    effects.check(leaves, configs)

    methods = [all_methods.get(config.method.method) for config in configs]
    optimizers = [
        config.optimizer.name(method)
        for config, method in zip(configs, methods, strict=True)
    ]
    steps_by_sign = any(method.inner.steps_by_sign for method in methods)
    optimizer_config.check_taken(leaves, optimizers, steps_by_sign)


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

    app.define_help_flags()
    # In place of absl's, which does not know defaults that depend on other flags.
    for name in ("help", "helpfull"):
        define_one(bool, name, False, "Print this and exit.", allow_override=True)
    app.run(call, flags_parser=parse)


def help_of(doc: str, is_full: bool = False) -> str:
    """Return the text of `--help`, with the values that hold given the other flags."""
    names = [flag.name for flag in FLAGS.get_key_flags_for_module(sys.argv[0])]
    sections: dict[str, Iterable[Option | str]] = {
        "Flags": options(FLAGS, filter(_is_of_program, names))
    }
    if "preset" not in FLAGS:
        return render(doc, sections)

    sections["Several processes"] = options(FLAGS, PROCESSES)
    sections["Elastic regions"] = options(FLAGS, ELASTIC)
    leaves = [name for name in LEAVES if name in FLAGS and not _is_of_program(name)]
    sections |= _run_sections(leaves)

    in_full: tuple[str, ...] = ()
    if is_full:
        in_full = ("",)
    elif "method" in leaves and given("method"):
        in_full = ("Method:",)
    return render(doc, by_use(sections, in_full))


def _is_of_program(name: str) -> bool:
    """Return whether a flag is the program's, such as a leaf with its own default."""
    if name in LEAVES:
        return name in FLAGS and FLAGS[name].default is not None
    return name not in PROCESSES and name not in ELASTIC


def _run_sections(leaves: Collection[str]) -> Sections:
    """Return leaves of a run's configuration by section, with the values they have."""
    without = LEAVES.keys() - set(leaves)
    if "method" in leaves:
        complete = config(without)
        methods = [complete.method.method]
        arguments = complete.method.values
    else:
        complete = config(without, METHODS)
        methods = list(METHODS)
        arguments = dict(complete.method.where_taken)

    taken = {name for method in methods for name in all_methods.defaults(method)}
    sections: dict[str, list[Option | str]] = {}
    for section, cls in SECTIONS.items():
        names = [name for name in leaves if LEAVES[name].section == section]
        values = dataclasses.asdict(getattr(complete, section))
        others: list[str] = []
        if section == "method":
            values = {"method": complete.method.method, **arguments}
            others = [name for name in names if name not in {"method", *taken}]

        entries: list[Option | str] = [
            Option(name, values.get(name), LEAVES[name].help, LEAVES[name].choices)
            for name in names
            if name not in others
        ]
        if others:
            entries.append(
                "Arguments of other methods, which --method=NAME --help explains: "
                f"{', '.join(others)}."
            )
        summary = (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
        title = f"{section.capitalize()}: {summary[:1].lower()}{summary[1:]}"
        sections[title] = entries
    return sections


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a `ValueError` of the set-up, not of training, into one line and exit."""
    try:
        yield
    except (ValueError, MissingExtraError, flags.Error) as error:
        refuse(error, FLAGS)


def parse(argv: Sequence[str]) -> list[str]:
    """Parse a command line that has flags only; return its first word, the program."""
    argv = ["--helpfull" if word == "--help=all" else word for word in argv]
    try:
        words = FLAGS(argv)
    except flags.Error as error:
        refuse(error, FLAGS)
    if len(words) > 1:
        refuse(f"unexpected argument {words[1]!r}; flags begin with --", FLAGS)
    return words
