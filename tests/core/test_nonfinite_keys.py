"""Numbers at padding, and nonfinite ones: no number at a padded key changes what real keys give."""

from dataclasses import replace

import pytest
import torch

from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.nonfinite_keys import finite_part
from attention_service.core.stages import stages

REAL = torch.tensor([[True, False, True, True, False], [False] * 5])
PADDED = (~REAL)[:, None, :, None]
AT_PADDING = {"small": 0.5, "large": 1e150, "infinite": -torch.inf, "NaN": torch.nan}


def with_padding(problem, number):
    """The problem with this number in place of all keys and values at padding."""
    return replace(problem, key_mask=REAL, **{n: getattr(problem, n).masked_fill(PADDED, number) for n in ("k", "v")})


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("number", AT_PADDING.values(), ids=AT_PADDING)
def test_no_number_at_padding_changes_weights_or_context(every_spec_or_mask, make_problem, number):
    problem = make_problem(spec=every_spec_or_mask)
    expected = dict(stages(with_padding(problem, 0.0), ("weights", "context")))
    given = with_padding(problem, number)
    finite, nonfinite = finite_part(given)
    assert nonfinite is None
    assert finite.finite
    for each in (given, finite):
        found = dict(stages(each, ("weights", "context")))
        same(found["weights"], expected["weights"])
        same(found["context"], expected["context"])
    for kernel in KERNELS:
        if not unsuitable(kernel.name, every_spec_or_mask, torch.float64, Needs()):
            same(attend(given, kernel=kernel.name).context, expected["context"])


def test_finite_padding_is_not_copied_and_other_padding_becomes_zero(make_problem):
    problem = with_padding(make_problem(), 3.0)
    assert finite_part(problem)[0].k is problem.k
    filled, _ = finite_part(with_padding(problem, torch.nan))
    assert (filled.k.masked_select(PADDED) == 0).all()
    assert (filled.v.masked_select(PADDED) == 0).all()


def test_a_real_key_that_is_not_finite_is_found(make_problem):
    problem = with_padding(make_problem(), torch.nan)
    values = problem.v.clone()
    values[0, 0, 2] = torch.inf
    part, nonfinite = finite_part(replace(problem, v=values))
    assert nonfinite is not None
    assert nonfinite.nonzero().tolist() == [[0, 0, 2]]
    assert not part.finite
    assert (part.v[0, 0, 2] == 0).all()
