"""Every score with every normalizer, bias of positions and kind of mask, by every kernel: against plain loops."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from attention_contract import spec
from attention_contract.positions import Alibi, NoPosition, RelativeBias
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import WeightDropout
from attention_service.core.scores import SCORES

SCORE_OPTIONS = [
    spec.Dot(), spec.ScaledDot(), spec.Bilinear(), spec.Additive(hidden=2), spec.Gaussian(sigma="learned"),
    spec.Cosine(scale="learned"),
]  # fmt: skip
NORMALIZER_OPTIONS = [
    spec.Softmax(temperature=0.7), spec.Softmax(sinks=True), spec.Sigmoid(), spec.Sparsemax(), spec.Entmax15(),
]  # fmt: skip
BIASES = [NoPosition(), Alibi(), RelativeBias(num_buckets=4, max_distance=6)]
MASKS = [spec.Causal(), spec.SlidingWindow(left=1)]
OTHERS = [([], 1.5, None), (MASKS, None, None), (MASKS, 1.5, 0.3)]
"""Masks, softcap and dropout."""
LENGTHS = torch.tensor([4, 0])


def gradients(problem, kernel):
    """The context, and the gradients of all that goes in."""
    learned = {name: x.clone().requires_grad_() for name, x in problem.learned.items()}
    q, k, v = (x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v))
    context = attend(replace(problem, q=q, k=k, v=v, learned=learned), kernel=kernel).context
    weighted = context * torch.arange(context.numel(), dtype=context.dtype).view_as(context)
    leaves = [q, k, v, *learned.values()]
    return context, *torch.autograd.grad(weighted.sum(), leaves, materialize_grads=True, allow_unused=True)


@pytest.mark.sampled
@pytest.mark.parametrize("normalizer", NORMALIZER_OPTIONS, ids=str)
@pytest.mark.parametrize("score", SCORE_OPTIONS, ids=lambda each: each.name)
def test_every_combination(score, normalizer, make_problem, reference):
    for position, (masks, softcap, dropout) in product(BIASES, OTHERS):
        given = spec.AttentionSpec(score=score, normalizer=normalizer, position=position, masks=masks, softcap=softcap)
        problem = make_problem(spec=given, queries=3, keys=5, past=1, key_lengths=LENGTHS)
        if dropout is None:
            found = attend(problem, kernel="materialized").context
            assert (found - reference(problem)["context"]).abs().max() <= 1e-12, given
        else:
            problem = replace(problem, dropout=WeightDropout(dropout, 1))
        expected = gradients(problem, "materialized")
        for kernel in (each.name for each in KERNELS if each.name != "materialized"):
            if not unsuitable(kernel, given, torch.float64, Needs(dropout=dropout is not None)):
                for found, wanted in zip(gradients(problem, kernel), expected, strict=True):
                    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_nothing_registered_is_left_out():
    assert {each.name for each in SCORE_OPTIONS} == {entry.name for entry in SCORES}
    assert {each.name for each in NORMALIZER_OPTIONS} == {entry.name for entry in NORMALIZERS}
    encodings = {"sinusoidal", "learned", "rope"}  # they change queries and keys, before any kernel sees them
    assert {each.name for each in BIASES} | encodings == {entry.name for entry in POSITIONS}
