"""Every score with every normalizer, bias of positions and kind of mask, by every kernel: against plain loops."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from attention_contract import spec
from attention_contract.positions import Alibi, NoPosition, RelativeBias
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, unsuitable
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES
from attention_service.core.types import Dropout

SCORE_OPTIONS = [
    spec.Dot(), spec.ScaledDot(), spec.Bilinear(), spec.Additive(hidden=2), spec.Gaussian(sigma="learned"),
    spec.Cosine(scale="learned"),
]  # fmt: skip
NORMALIZER_OPTIONS = [
    spec.Softmax(temperature=0.7), spec.Softmax(sinks=True), spec.Sigmoid(), spec.Sparsemax(), spec.Entmax15(),
]  # fmt: skip
BIASES = [NoPosition(), Alibi(), RelativeBias(num_buckets=4, max_distance=6)]
MASKS = [[], [spec.Causal(), spec.SlidingWindow(left=1)]]
LENGTHS = torch.tensor([4, 0])


@pytest.mark.parametrize("normalizer", NORMALIZER_OPTIONS, ids=str)
@pytest.mark.parametrize("score", SCORE_OPTIONS, ids=lambda each: each.name)
def test_every_combination(score, normalizer, make_problem, reference):
    for position, masks, softcap in product(BIASES, MASKS, (None, 1.5)):
        given = spec.AttentionSpec(score=score, normalizer=normalizer, position=position, masks=masks, softcap=softcap)
        problem = make_problem(spec=given, queries=3, keys=5, past=1, key_lengths=LENGTHS)
        expected = reference(problem)["context"]
        kernels = [each.name for each in KERNELS if not unsuitable(each.name, given, torch.float64)]
        assert "materialized" in kernels
        for kernel in kernels:
            found = attend(problem, kernel=kernel).context
            assert (found - expected).abs().max() <= 1e-12, f"{kernel}, {given}"


@pytest.mark.parametrize("score", SCORE_OPTIONS, ids=lambda each: each.name)
def test_every_combination_has_the_same_gradients(score, make_problem):
    def gradients(problem, kernel):
        learned = {name: x.clone().requires_grad_() for name, x in problem.learned.items()}
        q, k, v = (x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v))
        context = attend(replace(problem, q=q, k=k, v=v, learned=learned), kernel=kernel).context
        weighted = context * torch.arange(context.numel(), dtype=context.dtype).view_as(context)
        leaves = [q, k, v, *learned.values()]
        return torch.autograd.grad(weighted.sum(), leaves, materialize_grads=True, allow_unused=True)

    for normalizer, position, masks in product(NORMALIZER_OPTIONS, BIASES, MASKS):
        given = spec.AttentionSpec(score=score, normalizer=normalizer, position=position, masks=masks, softcap=1.5)
        for dropout in (None, Dropout(0.3, 1)):
            problem = make_problem(spec=given, queries=3, keys=5, past=1, key_lengths=LENGTHS, dropout=dropout)
            expected = gradients(problem, "materialized")
            for kernel in (each.name for each in KERNELS if each.name != "materialized"):
                if not unsuitable(kernel, given, torch.float64, dropout=dropout is not None):
                    for found, wanted in zip(gradients(problem, kernel), expected, strict=True):
                        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_nothing_registered_is_left_out():
    assert {each.name for each in SCORE_OPTIONS} == {entry.name for entry in SCORES}
    assert {each.name for each in NORMALIZER_OPTIONS} == {entry.name for entry in NORMALIZERS}
    encodings = {"sinusoidal", "learned", "rope"}  # they change queries and keys, before any kernel sees them
    assert {each.name for each in BIASES} | encodings == {entry.name for entry in POSITIONS}
