"""Flags from the configuration's leaves, and actionable errors.

Only this file and `flag_types` import absl. A run's configuration is its preset with
the flags that were given; it is rebuilt from them, so its own checks always run.
"""

import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from cocodc_jax._extras import MissingExtraError, extra
from cocodc_jax.fields import leaves_of
from cocodc_jax.methods import METHODS
from cocodc_jax.methods import get as get_method
from cocodc_jax.run import effects, flag_types, optimizer_config
from cocodc_jax.run.compile_cache import keep_programs
from cocodc_jax.run.config import LEAVES, TrainConfig
from cocodc_jax.run.elastic_flags import NOT_ELASTIC, ElasticFlags
from cocodc_jax.run.leaf_help import by_use, run_sections
from cocodc_jax.run.messages import STOPPED as STOPPED
from cocodc_jax.run.messages import USAGE_ERROR as USAGE_ERROR
from cocodc_jax.run.messages import as_a_command, options, refuse, render, say_once
from cocodc_jax.run.method_config import ARGUMENTS, check_taken
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
    """Define one more flag of the program."""
    flag_types.define(kind, name, default, text, FLAGS, **settings)
    # `--help` shows the key flags of the program.
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])


def define(without: Sequence[str] = (), workdir: str = RUN_FOLDER) -> None:
    """Define `--preset`, `--workdir` and a flag for every leaf."""
    presets = ", ".join(PRESETS)
    define_one(str, "preset", "tiny", f"Named configuration: {presets}.")
    define_one(pathlib.Path, "workdir", None, workdir)
    define_fields(Processes, is_unset=True)
    for name, leaf in ELASTIC.items():
        default = getattr(NOT_ELASTIC, name)
        text = f"With exchange=elastic: {leaf.help} Default: {default!r}."
        define_one(leaf.flag_type, name, None, text)
    for name, leaf in LEAVES.items():
        if name not in without:
            define_one(leaf.flag_type, name, None, leaf.help)


def define_fields(settings: type, is_unset: bool = False) -> None:
    """Define a flag for each field of a dataclass outside of the configuration."""
    for name, leaf in leaves_of("", settings).items():
        default = None if is_unset else getattr(settings, name)
        define_one(leaf.flag_type, name, default, leaf.help)


def read(settings: type[T]) -> T:
    """Return a dataclass with the values of its flags."""
    return settings(**{name: value(name) for name in leaves_of("", settings)})


def given(name: str) -> bool:
    """Return whether the flag is on the command line."""
    return name in FLAGS and bool(FLAGS[name].present)


def check_not_given(before: Sequence[str], nowhere: Sequence[str] = ()) -> None:
    """Refuse training flags that the program that starts the training sets itself."""
    for name in (*before, *nowhere):
        if given(name):
            place = f", or give --{name} before --" if name in before else ""
            raise ValueError(
                f"{name}={value(name)} after -- is decided here; leave it out{place}"
            )


def value(name: str) -> Any:
    """Return the flag's value."""
    return FLAGS[name].value


def processes() -> Processes:
    """Return which processes take part: the flags, over what a launcher has set."""
    told = {name: value(name) for name in PROCESSES if given(name)}
    if given("region_id"):
        return Processes(**told)  # A separate job, whatever its launcher has set.
    return Processes.from_environment(**told)


def check_processes(configs: Iterable[TrainConfig], num_processes: int) -> None:
    """Refuse a flag that has no effect in runs of so many processes."""
    names = [name for name in PROCESSES if given(name)]
    flags_given = _given_leaves(()) | {name: value(name) for name in names}
    effects.check_processes(flags_given, configs, num_processes)


def check_one_process() -> None:
    """Refuse flags or a launcher of several processes, and of an elastic region."""
    if told := [name for name in ELASTIC if given(name)]:
        raise ValueError(
            f"{told[0]}={value(told[0])} is of one elastic region, and this program "
            "trains all regions; leave it out, or use experiments.train"
        )
    if (count := processes().num_processes) != 1:
        raise ValueError(
            f"num_processes={count} is not possible: this program is one process; "
            "leave it out, or use experiments.train"
        )


def elastic() -> ElasticFlags:
    """Return the flags of elastic regions."""
    return ElasticFlags(**{name: value(name) for name in ELASTIC if given(name)})


def config(
    without: Sequence[str] = (), methods: Iterable[str] | None = None, **own: Any
) -> TrainConfig:
    """Return the preset with the flags given."""
    if value("preset") not in PRESETS:
        raise ValueError(
            f"preset={value('preset')!r} is unknown; use one of {sorted(PRESETS)}"
        )
    base = PRESETS[value("preset")]
    leaves = with_warmup(base, _given_leaves(without) | own)
    if methods is None:
        found = base.replace(**leaves)
        check_optimizers([found])
        return found
    check_methods(methods)
    where = {name: leaves.pop(name) for name in ARGUMENTS if name in leaves}
    return base.where(**where).replace(**leaves)


def check_methods(methods: Iterable[str]) -> None:
    """Refuse a flag that is an argument of other methods only."""
    check_taken(_given_leaves(tuple(LEAVES.keys() - ARGUMENTS.keys())), methods)


def check_optimizers(configs: Iterable[TrainConfig]) -> None:
    """Refuse a flag that no inner optimizer of the runs uses, or without an effect."""
    configs = list(configs)
    effects.check(_given_leaves(()), configs)
    pairs = [(c.optimizer, get_method(c.method.method)) for c in configs]
    optimizer_config.check_taken(
        _given_leaves(()),
        (optimizer.name(method) for optimizer, method in pairs),
        any(method.inner.steps_by_sign for _, method in pairs),
    )


def _given_leaves(without: Sequence[str]) -> dict[str, Any]:
    return {n: value(n) for n in LEAVES if n not in without and given(n)}


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
    own = [f.name for f in FLAGS.get_key_flags_for_module(sys.argv[0])]
    sections: dict[str, Any] = {"Flags": options(FLAGS, filter(_is_own, own))}
    if "preset" not in FLAGS:
        return render(doc, sections)
    sections["Several processes"] = options(FLAGS, PROCESSES)
    sections["Elastic regions"] = options(FLAGS, ELASTIC)
    names = [name for name in LEAVES if name in FLAGS and not _is_own(name)]
    without = tuple(LEAVES.keys() - set(names))
    if "method" in names:
        found = config(without)
        methods = [found.method.method]
    else:
        found, methods = config(without, METHODS), list(METHODS)
    sections |= run_sections(found, names, methods)
    chosen = ("Method:",) if "method" in names and given("method") else ()
    return render(doc, by_use(sections, ("",) if is_full else chosen))


def _is_own(name: str) -> bool:
    """Return whether a flag is the program's, such as a leaf with its own default."""
    if name in LEAVES:
        return name in FLAGS and FLAGS[name].default is not None
    return name not in PROCESSES and name not in ELASTIC


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a `ValueError` of the set-up, not of training, into one line and exit."""
    try:
        yield
    except (ValueError, MissingExtraError, flags.Error) as error:
        refuse(error, FLAGS)


def parse(argv: Sequence[str]) -> list[str]:
    """Parse a command line that has flags only; return its first word, the program."""
    try:
        words = FLAGS(["--helpfull" if word == "--help=all" else word for word in argv])
    except flags.Error as error:
        refuse(error, FLAGS)
    if len(words) > 1:
        refuse(f"unexpected argument {words[1]!r}; flags begin with --", FLAGS)
    return words
