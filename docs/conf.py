"""Sphinx configuration: the theme, and pages generated from the code at build time."""

import os
import pathlib
import sys
import tempfile

from docutils import nodes
from sphinx.util import logging

HERE = pathlib.Path(__file__).parent
PATHS = [str(HERE.parent), str(HERE)]
sys.path[:0] = PATHS
# Executed pages run in processes of their own, which need the same paths.
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each kernel warns that it talks to this process over TCP, which is on one machine.
KERNELS = tempfile.TemporaryDirectory()
PROFILE = pathlib.Path(KERNELS.name) / "profile_default"
PROFILE.mkdir()
(PROFILE / "ipython_kernel_config.py").write_text(
    'get_config().IPKernelApp.log_level = "ERROR"\n'
)
os.environ["IPYTHONDIR"] = KERNELS.name

import cache  # noqa: E402
import docstrings  # noqa: E402
import generate  # noqa: E402
import latex2mathml.converter  # noqa: E402

import cocodc_jax  # noqa: E402

project = html_title = "cocodc_jax"
author = "the cocodc_jax authors"
project_copyright = "the cocodc_jax authors, Apache-2.0"
release = version = cocodc_jax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_math_renderer = "mathml"  # Needs neither a script nor the network.
exclude_patterns = ["_build", ".jupyter_cache"]

html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "navbar_persistent": [],
}
html_static_path = ["_static"]
html_css_files = ["tables.css"]
# Summaries of what a search finds are fetched, which browsers refuse for files.
html_show_search_summary = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
# Pages are run again if their code changes, or anything that they read.
nb_execution_mode = "cache"
nb_execution_cache_path = str(cache.folder(HERE))
nb_execution_timeout = 1800  # Also on a busy machine.
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_markdown_format = "gfm"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
toc_object_entries_show_parents = "hide"
autodoc_preserve_defaults = True
highlight_language = "text"
default_role = "code"  # Docstrings write names in single backticks.
napoleon_use_ivar = True
copybutton_prompt_text = "$ "

generate.write(HERE)


def setup(app):
    """Let docstrings, which are plain text with equations, pass as reStructuredText."""
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)
    app.connect("autodoc-skip-member", skip_field)
    app.connect("source-read", keep_intervals)
    app.connect("include-read", keep_intervals)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))


def keep_intervals(app, *names_and_source):
    """Keep means and intervals in one piece, by spaces that do not break."""
    source = names_and_source[-1]
    source[0] = source[0].replace(" ± ", "\u00a0±\u00a0")


def skip_field(app, what, name, obj, skip, options):
    """Leave out the fields of named tuples: their class documents them."""
    return skip or type(obj).__name__ == "_tuplegetter"


def inline_math(translator, node):
    """Write an equation inside a line as MathML."""
    write_math(translator, node, "inline")


def block_math(translator, node):
    """Write an equation of its own as MathML."""
    write_math(translator, node, "block")


def write_math(translator, node, display):
    """Write LaTeX as MathML, which browsers show by themselves."""
    math = latex2mathml.converter.convert(node.astext(), display=display)
    if "\\" in math or "<mi>&</mi>" in math or "merror" in math:
        logging.getLogger(__name__).warning("no MathML for %s", node.astext())
    tag = "span" if display == "inline" else "div"
    translator.body.append(f'<{tag} class="equation">{math}</{tag}>')
    raise nodes.SkipNode
