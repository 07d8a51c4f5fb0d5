"""Writes the pages that are generated from the code: methods, API, programs, the tour.

They are written next to the pages that are kept by hand, and git ignores them.
"""

import concurrent.futures
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys

import cocodc_jax
from cocodc_jax.methods import METHODS
from cocodc_jax.report.units import format_bytes

ROOT = pathlib.Path(cocodc_jax.__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"


def write(docs):
    """Write all generated pages below a folder."""
    for folder in ("methods", "reference", "programs"):
        for old in (docs / folder).glob("*.md"):
            if old.name != "index.md":
                old.unlink()
        (docs / folder).mkdir(exist_ok=True)

    write_methods(docs / "methods")
    write_reference(docs / "reference")
    write_programs(docs / "programs")

    shutil.copyfile(ROOT / "experiments/tour.ipynb", docs / "start/tour.ipynb")
    pictures = docs / "_static" / "pictures"
    pictures.mkdir(exist_ok=True)
    for picture in RESULTS.glob("*.png"):
        shutil.copyfile(picture, pictures / picture.name)


def write_methods(folder):
    """Write a page for each file of methods: its docstring, arguments and results."""
    measured = json.loads((RESULTS / "compare_all.json").read_text())["methods"]
    by_module = {}
    for name, factory in METHODS.items():
        by_module.setdefault(factory.__module__, []).append(name)

    for module, names in by_module.items():
        title = module.rpartition(".")[2] if len(names) > 1 else names[0]
        rows = [(name, measured[name]) for name in names if name in measured]

        page = [f"# {title}", ""]
        if "contrib" in module.split("."):
            page += _FROM_MEMORY
        page += ["```{eval-rst}", f".. automodule:: {module}", "   :no-index:", "```"]
        page += ["", *_arguments(names)]
        if rows:
            page += _measured(rows)
        (folder / f"{title}.md").write_text("\n".join(page))


_FROM_MEMORY = [
    ":::{note}",
    "This method was written from memory, in part or in full. Check it against the "
    "paper before you reproduce published figures.",
    ":::",
    "",
]


def _arguments(names):
    """Return the section with the arguments of the methods of a file."""
    lines = [
        "## Arguments",
        "",
        "Each argument is a flag of the programs, with the default shown here. "
        "[Symbols](../glossary.md#symbols) are the same for all methods.",
        "",
        "```{eval-rst}",
    ]
    for name in names:
        factory = METHODS[name]
        lines += [f".. autofunction:: {factory.__module__}.{factory.__name__}", ""]
    return [*lines, "```", ""]


def _measured(rows):
    """Return the section with the results of methods, pairs of a name and a result."""
    lines = [
        "## Measured",
        "",
        "One seed, 840,000 parameters, 480 steps, four regions, the method's "
        "defaults (`experiments/results/compare_all.json`; the command and all "
        "methods are on [one page](../results/methods.md)).",
        "",
        "| method | last loss | sent by a region |",
        "| --- | --- | --- |",
    ]
    for name, row in rows:
        loss = row["eval_loss"]["mean"]
        sent = format_bytes(row["bytes_sent_per_region"]["mean"])
        lines.append(f"| `{name}` | {loss:.3f} | {sent} |")
    return [*lines, ""]


def write_reference(folder):
    """Write a page for each package: every public name, with its docstring."""
    seen = {}
    top = [n for n in cocodc_jax.__all__ if n not in ("__version__", "methods")]

    # The order of use is that of the page that is written by hand.
    index = (folder / "index.md").read_text()
    in_order = re.findall(r"`cocodc_jax\.(\w+)`", index)
    top.sort(key=lambda n: in_order.index(n) if n in in_order else len(in_order))
    page = _page("cocodc_jax", [("cocodc_jax", n) for n in top], seen)
    (folder / "cocodc_jax.md").write_text(page)

    for module in pkgutil.iter_modules(cocodc_jax.__path__):
        if module.ispkg and module.name[0] != "_" and module.name != "experiments":
            package = f"cocodc_jax.{module.name}"
            names = [(package, n) for n in dir(importlib.import_module(package))]
            (folder / f"{module.name}.md").write_text(_page(package, names, seen))


def _page(title, names, seen):
    """Return a page of names; names that have an entry already are links to it.

    Args:
      title: the package, and the heading.
      names: pairs of a package and a name.
      seen: the path of each documented object, to which those of this page are added.
    """
    lines = [f"# {title}", "", "```{eval-rst}", f".. automodule:: {title}", ""]
    elsewhere = []
    submodules = []

    for package, name in names:
        value = getattr(importlib.import_module(package), name)
        if name[0] == "_":
            continue
        if inspect.ismodule(value):
            submodules.append(value)
        elif inspect.isclass(value) or inspect.isfunction(value):
            if value in seen:
                elsewhere.append(f":py:obj:`{name} <{seen[value]}>`")
                continue
            seen[value] = f"{package}.{name}"
            lines += _entry(value, seen[value], title)
        else:
            lines += [f".. py:data:: {package}.{name}", ""]

    for module in submodules:
        lines += [f".. rubric:: {module.__name__}", ""]
        lines += [f".. automodule:: {module.__name__}", ""]
        for name, value in inspect.getmembers(module):
            is_here = getattr(value, "__module__", "") == module.__name__
            if name[0] != "_" and is_here and callable(value) and value not in seen:
                seen[value] = f"{module.__name__}.{name}"
                lines += _entry(value, seen[value], title)

    if elsewhere:
        lines += [f"Also here: {', '.join(elsewhere)}.", ""]
    return "\n".join([*lines, "```", ""])


def _entry(value, path, title):
    """Return the directive of a name, after the other ids that source pages link to."""
    kind = "class" if inspect.isclass(value) else "function"
    name = path.rpartition(".")[2]
    others = sorted({f"cocodc_jax.{name}", f"{title}.{name}"} - {path})
    ids = "".join(f'<span id="{x}"></span>' for x in others)
    anchors = [".. raw:: html", "", f"   {ids}", ""] if ids else []
    members = ["   :members:", ""] if kind == "class" else [""]
    return [*anchors, f".. auto{kind}:: {path}", *members]


def write_programs(folder):
    """Write a page for each program: its help, by sections."""
    paths = sorted((ROOT / "experiments").glob("*.py"))
    paths = [p for p in paths if "\ncli = " in p.read_text()]
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in paths]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for module, text in zip(modules, pool.map(_help, modules), strict=True):
            name = module.rpartition(".")[2]
            (folder / f"{name}.md").write_text(_program(name, module, text))


def _help(module):
    command = [sys.executable, "-m", module, "--help=all"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
    return done.stdout


def _program(name, module, text):
    """Return a page of a program's help, with a heading for each section."""
    lines = [f"# {name}", "", f"`python -m {module} --help=all`", "", "```text"]

    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        after = text.partition(f"\n{line}\n")[2]
        if line and line[0] != " " and not before and re.match(r"  --", after):
            lines += ["```", "", f"## {line}", "", "```text"]
        else:
            lines.append(line)

    return "\n".join([*lines, "```", ""])
