"""The problems and masks of the tests of the mathematics, and its one thread."""

from tests.core.conftest import every_mask, make_problem, one_thread  # noqa: F401
