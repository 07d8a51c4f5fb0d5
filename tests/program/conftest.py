"""The tiny regression and its methods, as fixtures."""

import pytest

from tests.program import tiny as problem


@pytest.fixture(scope="session")
def tiny():
    return problem


@pytest.fixture(params=list(problem.METHODS))
def method_name(request):
    return request.param
