"""The tiny regression of the runtime's tests."""

from tests.runtime.conftest import tiny  # noqa: F401
