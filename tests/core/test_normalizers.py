"""Normalizers against the `entmax` package and PyTorch, in float64; their gradients, dtypes and limits."""

import math
from dataclasses import replace

import entmax
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_contract import spec
from attention_service.core.attention import attend
from attention_service.core.normalizers import NORMALIZERS

SPARSE = {"sparsemax": (spec.Sparsemax, entmax.sparsemax), "entmax15": (spec.Entmax15, entmax.entmax15)}
OTHERS = [entry.options for entry in NORMALIZERS if entry.name != "softmax"]
TO_ONE = [entry.options for entry in NORMALIZERS if entry.name != "sigmoid"]
tried = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
every_other = pytest.mark.parametrize("options", OTHERS, ids=lambda options: options.__name__)


def normal(*shape, seed=0, spread=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def weights(options, scores, lengths=None):
    return NORMALIZERS.of(options).weights(scores, lengths)


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
def test_the_published_implementation(name, temperature):
    make, published = SPARSE[name]
    for keys, spread in ((1, 1.0), (2, 1.0), (7, 10.0), (300, 1e-3), (300, 10.0)):
        scores = normal(3, 5, keys, spread=spread).requires_grad_()
        found, expected = weights(make(temperature=temperature), scores), published(scores / temperature, dim=-1)
        close(found, expected, atol=1e-10)
        upstream = normal(3, 5, keys, seed=1)
        (gradient,) = torch.autograd.grad(found, scores, upstream)
        close(gradient, torch.autograd.grad(expected, scores, upstream)[0], atol=1e-10)


@pytest.mark.parametrize(("bias", "temperature"), [(None, 1.0), (None, 0.5), (0.0, 1.0), (-1.5, 3.0)])
def test_the_sigmoid(bias, temperature):
    scores = normal(2, 1, 3, 5).requires_grad_()
    found = weights(spec.Sigmoid(bias=bias, temperature=temperature), scores)
    expected = torch.sigmoid(scores / temperature + (-math.log(5) if bias is None else bias))
    close(found, expected)
    upstream = normal(2, 1, 3, 5, seed=1)
    (gradient,) = torch.autograd.grad(found, scores, upstream)
    close(gradient, upstream * expected * (1 - expected) / temperature)


def test_the_bias_counts_the_keys_that_are_no_padding_and_no_mask_changes_it(make_problem):
    sigmoid = spec.AttentionSpec(normalizer=spec.Sigmoid())
    problem = make_problem(spec=sigmoid.model_copy(update={"masks": [spec.SlidingWindow(left=0, right=1)]}))
    open_, narrow = (
        attend(each, ("weights",), kernel="materialized").taps["weights"]
        for each in (replace(problem, spec=sigmoid), problem)
    )
    seen = narrow > 0
    assert narrow[seen].equal(open_[seen])
    padding = torch.tensor([[True] * 5, [False, True, True, False, True]])
    padded = attend(replace(problem, spec=sigmoid, key_mask=padding), ("scores", "weights"), kernel="materialized").taps
    expected = torch.sigmoid(padded["scores"] - torch.tensor([5.0, 3.0]).double().log()[:, None, None, None])
    close(padded["weights"], expected * padding[:, None, None])


def test_known_weights():
    scores = torch.tensor([1.0, 0.5, -1.0, 0.5], dtype=torch.float64)
    assert weights(spec.Sparsemax(), scores).tolist() == pytest.approx([2 / 3, 1 / 6, 0, 1 / 6])
    assert weights(spec.Sparsemax(), scores[:3]).tolist() == pytest.approx([0.75, 0.25, 0])
    assert weights(spec.Entmax15(), torch.tensor([0.0, -2.0, -9.0])).tolist() == [1, 0, 0]
    assert weights(spec.Softmax(), torch.tensor([2.0, 1.0, 0.5])).tolist() == pytest.approx(
        [0.6285, 0.2312, 0.1402], abs=5e-5
    )
    equal = torch.zeros(4, dtype=torch.float64)
    for options in TO_ONE:
        assert weights(options(), equal).tolist() == pytest.approx([0.25] * 4)
    assert weights(spec.Sigmoid(), equal[None, None, None])[0, 0, 0].tolist() == pytest.approx([1 / 5] * 4)


EVERY = [entry.options for entry in NORMALIZERS]


@every_other
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_narrower_dtypes_are_normalized_in_float32(options, dtype, make_problem):
    problem = make_problem(keys=40, dtype=dtype, spec=spec.AttentionSpec(normalizer=options()))
    taps = attend(problem, ("masked_scores", "weights"), kernel="materialized").taps
    assert (taps["masked_scores"].dtype, taps["weights"].dtype) == (torch.float32, dtype)
    expected = weights(options(), taps["masked_scores"].double())
    close(taps["weights"].double(), expected, atol=max(torch.finfo(dtype).eps, 2e-6))


@pytest.mark.parametrize("options", EVERY, ids=lambda options: options.__name__)
def test_large_scores_and_long_rows_do_not_overflow(options):
    for scale in (1e4, 1e30):
        scores = (torch.tensor([3.0, 3.0, -3.0, -math.inf]) * scale).requires_grad_()
        found = weights(options(), scores)
        assert found.tolist() == pytest.approx([1, 1, 0, 0] if options is spec.Sigmoid else [0.5, 0.5, 0, 0])
        assert torch.autograd.grad(found[0], scores)[0].isfinite().all()
    long = normal(2, 20_000).float()
    close(weights(options(), long).double(), weights(options(), long.double()), atol=1e-6)


def test_temperature_divides_the_scores_of_a_softmax():
    x = torch.tensor([[2.0, 1.0, 0.5, -math.inf]])
    warm, plain = (NORMALIZERS.of(spec.Softmax(temperature=each)) for each in (2.0, 1.0))
    assert warm.weights(x).equal(plain.weights(x / 2))
    assert warm.lse(x).equal(plain.lse(x / 2))


@pytest.mark.parametrize(
    ("requested", "given", "runs_in"),
    [
        ("float32", torch.float16, torch.float32),
        ("float32", torch.bfloat16, torch.float32),
        ("float32", torch.float64, torch.float64),
        ("float64", torch.float32, torch.float64),
        ("float16", torch.float32, torch.float16),
        ("bfloat16", torch.float64, torch.bfloat16),
        ("bfloat16", torch.float16, torch.bfloat16),
    ],
)
def test_the_requested_dtype_is_a_floor_unless_it_is_a_half_type(requested, given, runs_in, make_problem):
    for options, taps in ((spec.Softmax, ("weights", "lse", "context")), (spec.Sigmoid, ("weights", "context"))):
        problem = make_problem(dtype=given, keys=50, spec=spec.AttentionSpec(normalizer=options(dtype=requested)))
        exact = replace(problem, spec=spec.AttentionSpec(normalizer=options(dtype="float64")))
        found = attend(problem, taps, kernel="materialized").taps
        assert {name: x.dtype for name, x in found.items()} == {
            name: runs_in if name == "lse" else given for name in taps
        }
        error = (found["weights"] - attend(exact, taps, kernel="materialized").taps["weights"]).abs().max()
        assert error < 1e-2
        assert runs_in.itemsize > 2 or given.itemsize == 2 or error > 1e-6, "a half type is coarser"


def a_problem_with_blind_rows_and_ties(make_problem, options):
    mask = torch.zeros(4, 4, dtype=torch.float64)
    mask[1], mask[2, 1:3] = -math.inf, -math.inf
    problem = make_problem(queries=4, keys=4, width=3, mask=mask, key_lengths=torch.tensor([4, 3]))
    k = torch.cat([problem.k[:, :, :2], problem.k[:, :, 1:2], problem.k[:, :, 3:]], dim=2)  # keys 1 and 2 tie
    return replace(problem, k=k, spec=spec.AttentionSpec(normalizer=options(temperature=0.8), masks=[spec.Causal()]))


@pytest.mark.sampled
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("options", EVERY, ids=lambda options: options.__name__)
def test_gradients_and_their_gradients(options, softcap, make_problem):
    problem = a_problem_with_blind_rows_and_ties(make_problem, options)
    problem = replace(problem, spec=problem.spec.model_copy(update={"softcap": softcap}))

    def context(q, k, v):
        return attend(replace(problem, q=q, k=k, v=v), kernel="materialized").context

    leaves = [x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    assert torch.autograd.gradcheck(context, leaves)
    assert torch.autograd.gradgradcheck(context, leaves, fast_mode=True)


@every_other
@pytest.mark.parametrize("kernel", ["materialized", "fused"])
def test_there_is_no_lse(options, kernel, make_problem):
    with pytest.raises(ValueError, match=r"has no lse|unsuitable"):
        attend(make_problem(spec=spec.AttentionSpec(normalizer=options())), ("lse",), kernel=kernel)


rows = st.lists(st.floats(-30, 30) | st.sampled_from([0.0, 1.0, -math.inf]), min_size=1, max_size=8)
normalizers = st.builds(lambda options, temperature: options(temperature=temperature),
                        st.sampled_from([entry.options for entry in NORMALIZERS]), st.floats(0.1, 10))  # fmt: skip


@tried
@given(normalizers, rows)
def test_weights_are_not_negative_and_sum_to_one_where_they_should(normalizer, row):
    scores = torch.tensor(row, dtype=torch.float64)
    found = weights(normalizer, scores)
    assert (found >= 0).all()
    assert (found <= 1 + 1e-12).all()
    assert found[scores == -math.inf].count_nonzero() == 0
    if type(normalizer) in TO_ONE:
        assert float(found.sum()) == pytest.approx(float((scores > -math.inf).any()))


@tried
@given(normalizers, rows, st.floats(-20, 20))
def test_higher_scores_have_higher_weights_and_a_shift_changes_none(normalizer, row, shift):
    scores = torch.tensor(row, dtype=torch.float64)
    found = weights(normalizer, scores)
    order = scores.argsort()
    assert (found[order].diff() >= -1e-12).all()
    if type(normalizer) in TO_ONE:
        close(weights(normalizer, scores + shift), found, atol=1e-10)
