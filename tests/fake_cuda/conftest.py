"""A fake GPU for each test, on machines that can have one."""

import pytest

from tests.fake_cuda.device_guard import library
from tests.fake_cuda.machine import Machine

_LIBRARY = library()  # tests are collected before the first one runs


@pytest.fixture
def cuda() -> Machine:
    """A GPU that is not there."""
    if _LIBRARY is None:
        pytest.skip("fake tensors on cuda:0 need a build of torch for the CPU, and g++")
    return Machine()
