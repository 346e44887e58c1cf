"""Directions between states, of cases whose direction is known."""

import numpy as np
import pytest

from attention_service.core.inspection.steering_directions import mean_difference, principal_direction

U = np.array([0.6, 0.0, -0.8, 0.0])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_component_of_differences_along_a_line_is_the_line_with_the_sign_of_most(sign):
    ahead = sign * np.array([1.0, 2.0, 5.0, -0.5])
    np.testing.assert_allclose(principal_direction(ahead[:, None] * U), sign * U, atol=1e-12)


def test_differences_that_are_all_the_same_have_no_component():
    assert principal_direction(np.tile(U, (3, 1))) is None


def test_the_difference_of_means_is_by_the_counts_of_each_side():
    positive, negative = np.array([[2.0, 0], [4, 2]]), np.array([[1.0, 1]])
    found = mean_difference(positive.sum(0), 2, negative.sum(0), 1)
    np.testing.assert_array_equal(found, [2, 0])
