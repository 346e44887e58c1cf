"""Circuits against singular values of matrices that numpy forms whole, in float64."""

import numpy as np
import pytest
import torch

from attention_contract.schemas.modules import ModuleConfig
from attention_service.core.inspection import circuits
from attention_service.core.inspection.circuits import Factors, Writers
from attention_service.core.multihead import Sizes, initial_parameters

CONFIGS = {
    "every head its own": {"num_heads": 4},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "one key/value head": {"num_heads": 4, "num_kv_heads": 1},
    "other widths": {"num_heads": 2, "head_dim": 5, "value_dim": 3, "key_width": 7, "value_width": 6},
    "heads wider than the model": {"num_heads": 2, "head_dim": 15, "value_dim": 14},
    "a scale": {"num_heads": 4, "spec": {"score": {"name": "scaled_dot", "scale": -0.25}}},
    "dot": {"num_heads": 4, "spec": {"score": {"name": "dot"}}},
    "bilinear, grouped": {"num_heads": 4, "num_kv_heads": 2, "spec": {"score": {"name": "bilinear"}}},
}


@pytest.fixture(params=CONFIGS)
def module(request):
    sizes = Sizes.of(ModuleConfig(d_model=12, **CONFIGS[request.param]))
    return sizes, initial_parameters(sizes, 3, torch.float32)


def whole(module, head):
    """W_QK and W_OV of one head, formed by their definitions."""
    sizes, parameters = module
    p = {name: value.double().numpy() for name, value in parameters.items()}
    read = head // (sizes.heads // sizes.kv_heads)
    q, k, v = (
        p[f"{role}_proj.weight"].reshape(heads, width, -1)[at]
        for role, heads, width, at in (
            ("q", sizes.heads, sizes.head_dim, head),
            ("k", sizes.kv_heads, sizes.head_dim, read),
            ("v", sizes.kv_heads, sizes.value_dim, read),
        )
    )
    o = p["o_proj.weight"][:, head * sizes.value_dim : (head + 1) * sizes.value_dim]
    score = sizes.spec.score
    if score.name == "bilinear":
        return q.T @ p["score.weight"][head] @ k, o @ v
    scale = 1 if score.name == "dot" else score.scale or sizes.head_dim**-0.5
    return scale * q.T @ k, o @ v


def of(module, head):
    sizes, parameters = module
    return circuits.qk_factors(parameters, sizes, head), circuits.ov_factors(parameters, sizes, head)


def test_singular_values_norms_and_ranks_are_those_of_the_whole_matrix(module):
    for head in range(module[0].heads):
        for factors, matrix in zip(of(module, head), whole(module, head), strict=True):
            expected = np.linalg.svd(matrix, compute_uv=False)
            values = circuits.decompose(factors, vectors=False).values
            assert len(values) == min(*matrix.shape, factors.left.shape[1])
            np.testing.assert_allclose(values, expected[: len(values)], atol=1e-12)
            np.testing.assert_allclose(expected[len(values) :], 0, atol=1e-12)
            np.testing.assert_allclose(circuits.norm(values), np.linalg.norm(matrix))
            shares = expected[expected > 1e-13] / expected.sum()
            np.testing.assert_allclose(circuits.effective_rank(values), np.exp(-(shares * np.log(shares)).sum()))
            np.testing.assert_allclose(
                circuits.stable_rank(values), np.linalg.norm(matrix) ** 2 / np.linalg.norm(matrix, 2) ** 2
            )


def test_singular_vectors_make_the_matrix_and_their_largest_element_is_positive(module):
    for factors, matrix in zip(of(module, 1), whole(module, 1), strict=True):
        values, left, right = circuits.decompose(factors, vectors=True)
        np.testing.assert_allclose(left.T @ torch.diag(values) @ right, matrix, atol=1e-12)
        np.testing.assert_allclose(left @ left.T, np.eye(len(values)), atol=1e-12)
        np.testing.assert_allclose(right @ right.T, np.eye(len(values)), atol=1e-12)
        assert (left.gather(1, left.abs().argmax(1, keepdim=True)) > 0).all()


def test_a_copying_score_is_that_of_the_eigenvalues(module):
    sizes = module[0]
    for head in range(sizes.heads if sizes.value_width == sizes.d_model else 0):
        values = np.linalg.eigvals(whole(module, head)[1])
        expected = (values.sum() / np.abs(values).sum()).real
        np.testing.assert_allclose(circuits.copying(of(module, head)[1]), expected, atol=1e-9)


@pytest.mark.parametrize(("sign", "score"), [(1.0, 1.0), (-1.0, -1.0), (0.0, 0.0)])
def test_a_head_that_copies_scores_one_and_one_that_negates_minus_one(sign, score):
    left = torch.linalg.qr(torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    np.testing.assert_allclose(circuits.copying(Factors(sign * left, left)), score, atol=1e-12)


def test_composition_scores_are_those_of_the_products(module):
    later = Sizes.of(ModuleConfig(d_model=12, num_heads=4, num_kv_heads=2))
    reader = later, initial_parameters(later, 5, torch.float32)
    writers = Writers([of(module, head)[1] for head in range(module[0].heads)])
    for head in range(later.heads):
        qk, ov = of(reader, head)
        whole_qk, whole_ov = whole(reader, head)
        for factors, matrix in ((qk.transposed, whole_qk.T), (qk, whole_qk), (ov, whole_ov)):
            written = [whole(module, each)[1] for each in range(module[0].heads)]
            expected = [
                np.linalg.norm(matrix @ one) / (np.linalg.norm(matrix) * np.linalg.norm(one)) for one in written
            ]
            np.testing.assert_allclose(writers.composition(factors), expected, rtol=1e-9)


def test_the_baseline_is_the_mean_over_random_rotations(rng):
    width = 12
    matrix, written = rng.normal(size=(width, width)), np.outer(*rng.normal(size=(2, width)))
    squares = []
    for _ in range(2000):
        rotation = np.linalg.qr(rng.normal(size=(width, width)))[0]
        score = np.linalg.norm(matrix @ rotation @ written) / (np.linalg.norm(matrix) * np.linalg.norm(written))
        squares.append(score**2)
    np.testing.assert_allclose(np.sqrt(np.mean(squares)), width**-0.5, rtol=0.02)


def test_zero_and_huge_matrices_have_ranks_and_norms():
    zero, huge = torch.zeros(3, dtype=torch.float64), torch.tensor([3e200, 4e200], dtype=torch.float64).flip(0)
    for measure in (circuits.norm, circuits.effective_rank, circuits.stable_rank):
        assert measure(zero) == 0
        assert measure(huge).isfinite()
    np.testing.assert_allclose(circuits.norm(huge), 5e200)
    nothing = Factors(torch.zeros(4, 2, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64))
    assert Writers([nothing]).composition(nothing).tolist() == [0.0]


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4)])
def test_a_spectrum_has_a_matrix_for_each_leading_index(shape, rng):
    parameter = rng.normal(size=shape)
    expected = [np.linalg.norm(parameter)] if len(shape) == 1 else np.linalg.svd(parameter, compute_uv=False)
    np.testing.assert_allclose(circuits.spectrum(torch.from_numpy(parameter)), expected)


@pytest.mark.parametrize(
    ("score", "bilinear"),
    [
        ("dot", True),
        ("scaled_dot", True),
        ("bilinear", True),
        ("additive", False),
        ("gaussian", False),
        ("cosine", False),
    ],
)
def test_only_a_product_of_linear_parts_has_a_query_key_circuit(score, bilinear):
    config = ModuleConfig(d_model=8, num_heads=2, spec={"score": {"name": score}})
    assert circuits.has_qk(config.spec) is bilinear
