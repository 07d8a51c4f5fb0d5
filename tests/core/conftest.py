"""The tiny regression of the runtime's tests."""

from tests.program.conftest import tiny  # noqa: F401
