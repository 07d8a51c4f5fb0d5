"""Virtual devices and compiled programs for every test, set before JAX starts."""

import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import shutil
import sys
import tempfile

import jax
import optax
import pytest
from beartype import BeartypeConf, FrozenDict
from beartype.claw import beartype_packages
from hypothesis import settings

# Commands that tests start read the sources compiled: it takes each a second otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Packages whose annotations are checked while tests run; before anything imports them.
_CHECKED = ("cocodc_jax.transforms",)

# An int is a float. Optax's trees cannot be checked: their types refer to themselves.
_TREES = dict.fromkeys((optax.Updates, optax.Params, optax.OptState), object)
beartype_packages(
    _CHECKED,
    conf=BeartypeConf(
        hint_overrides=FrozenDict(_TREES), is_pep484_tower=True, is_random=False
    ),
)


def _free_states(package):
    """Let states hold anything: JAX also builds them of shapes, shardings and None."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        for cls in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(cls) and hasattr(cls, "_fields"):
                cls.__new__ = inspect.unwrap(cls.__new__)


for _package in _CHECKED:
    _free_states(_package)


def pytest_xdist_auto_num_workers(config):
    """One more than there are cores: some tests wait for processes and for silence."""
    del config
    return len(os.sched_getaffinity(0)) + 1


# The same examples every time: a suite must not fail now and then. There is no
# deadline, as a busy machine makes examples slow.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

# Most of the time here is compiling what then runs for microseconds: a program of small
# kernels takes a tenth of the usual time so. Commands that tests start inherit it.
_XLA = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_use_xnnpack=false"
)
# XLA ends a process whose flags it does not know, and JAX 0.11 has other ones.
if jax.__version_info__ < (0, 11) and _XLA not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_XLA}".strip()
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)
# Which line of Python an operation comes from is a twentieth of a test's time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
jax.config.update("jax_traceback_in_locations_limit", 0)

# Commands that tests start stay there too, whatever compilers are installed.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight for region, data and model axes of a test mesh, one for the outer mesh.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 9)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests compile the same programs, and so do the commands that they run: one cache
# for all workers and commands. The first process makes it and removes it. Reading a
# program takes less time than compiling it, unless it takes a few milliseconds.
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_own_cache = None
if "PYTEST_XDIST_WORKER" not in os.environ:
    _own_cache = os.environ[_CACHE] = tempfile.mkdtemp(prefix="cocodc_xla_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.01)


def pytest_collection_modifyitems(items):
    """Expect tests of float16 to fail on x86 without F16C, for which XLA has none."""
    of_float16 = [item for item in items if re.search("(?<!b)float16", item.name)]
    try:
        if of_float16:
            jax.jit(lambda x: x.astype("float16"))(1.0)
    except jax.errors.JaxRuntimeError as error:
        for item in of_float16:
            item.add_marker(pytest.mark.xfail(raises=type(error), reason="XLA #6787"))


def pytest_collection_finish():
    """Lets the garbage collector pass over the modules imported by now.

    Tracing makes many small objects, so that it runs often, each time over the whole
    heap of a worker: a seventh of a worker's processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def _main(patch, program, words):
    """Runs a program's `main` with flags of its own, and returns its exit code."""
    from absl.flags import FlagValues

    from cocodc_jax.run.config import flags

    patch.setattr(flags, "FLAGS", FlagValues())
    patch.setattr(sys, "argv", [program.__name__, *map(str, words)])
    try:
        if not hasattr(program, "define"):
            return program.main(sys.argv)
        program.define()
        flags.parse(sys.argv)
        program.main()
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a program's `main` in this process, with flags of its own.

    Takes the program's module, with `define` and `main` or with `main` of the words,
    and its flags; checks its exit code, returns standard output and standard error.
    """

    def finish(program, *words, code=0):
        ended = _main(monkeypatch, program, words)
        out, err = capsys.readouterr()
        assert ended == code, err
        return out, err

    return finish


@pytest.fixture
def refused(call):
    """As `call`, where a flag is wrong: returns what the one line says of it."""

    def line(program, *words, code=2):
        _, error = call(program, *words, code=code)
        assert (error.count("\n"), error[:7]) == (1, "error: "), error
        return error[7:-1]

    return line


@pytest.fixture(scope="session")
def call_once():
    """As `call`, for fixtures whose files many tests read."""

    def finish(program, *words):
        out = io.StringIO()
        err = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = _main(patch, program, words)
        assert code == 0, err.getvalue()
        return out.getvalue(), err.getvalue()

    return finish


@pytest.fixture
def recorded_sync():
    """Makes a sync as a process's timeline.json has it."""

    def made(fragment, start, apply, start_s, arrival_s, merge_s, stall_s):
        return {
            "fragment": fragment,
            "start_step": start,
            "apply_step": apply,
            "start_s": start_s,
            "arrival_s": arrival_s,
            "merge_s": merge_s,
            "stall_s": stall_s,
            "num_bytes": 100,
        }

    return made


@pytest.fixture
def recorded_run(tmp_path, recorded_sync):
    """Two processes: a second a step, the second one half a second behind."""
    for name, late in (("", 0.0), ("process_1", 0.5)):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        marks = [[step, 10.0 + step + late] for step in (0, 2, 4, 6)]
        marks[-1][1] += 1.0  # Waited a second before step 6 was done.
        table = {
            "marks": marks,
            "syncs": [
                recorded_sync(0, 0, 2, 10.0 + late, 11.0, 12.0 + late, 0.0),
                recorded_sync(1, 2, 4, 12.0 + late, 15.0, 15.0 + late, 1.0),
                recorded_sync(0, 4, None, 14.0 + late, None, None, None),
            ],
        }
        (folder / "timeline.json").write_text(json.dumps(table))

    config = {"method": {"method": "diloco", "sync_interval": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def pytest_unconfigure():
    """Takes the cache down at the end."""
    if _own_cache:
        shutil.rmtree(_own_cache, ignore_errors=True)
