"""The files that a message passes, as `docs/design/messages.md` has them."""

import importlib.util
import pathlib

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def trace():
    """The script that follows a message, and its trace."""
    path = DOCS / "message_trace.py"
    spec = importlib.util.spec_from_file_location("message_trace", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.follow()


def test_a_message_passes_few_files(trace):
    _, message = trace
    both = {*message.start.files, *message.finish.files}
    assert len(both) <= 11
    assert {"engine/executor.py", "core/sync.py"} <= both


def test_the_page_has_the_lines_of_the_trace(trace):
    module, message = trace
    page = module.PAGE.read_text()
    assert module.replaced(page, module.lines(message)) == page
