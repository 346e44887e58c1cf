"""The problems and masks of the tests of the mathematics, and its one thread; which of the many counts are quick."""

import pytest
from tests.core.conftest import every_mask, make_problem, one_thread  # noqa: F401

QUICK = 4
"""One of so many exact counts is quick; the others are a long walk."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of the exact counts to the long walk."""
    counts = [item for item in items if item.path.name == "test_traffic.py" and hasattr(item, "callspec")]
    for index, item in enumerate(counts):
        if index % QUICK:
            item.add_marker(pytest.mark.slow)
