"""Hopfield retrieval against the paper's formulas written out, and the properties that the paper proves."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from attention_service.core import blocks
from attention_service.core.hopfield import DOT_PRODUCTS, PatternMemory, retrieve
from attention_service.cost import RetrievalSizes, retrieval_flops


def drawn(seed=0, batch=2, heads=3, patterns=7, states=5, width=6, masked=False):
    """Patterns, one β for each head, a mask or none, and states, all in float64."""
    make = torch.Generator().manual_seed(seed)
    mask = None
    stored = torch.randn(batch, heads, patterns, width, generator=make, dtype=torch.float64)
    if masked:
        mask = torch.arange(patterns) <= torch.arange(batch)[:, None] + 1
        stored = stored * mask[:, None, :, None]
    beta = torch.rand(heads, generator=make, dtype=torch.float64) * 3 + 0.1
    return PatternMemory(stored, beta, mask), torch.randn(
        batch, heads, states, width, generator=make, dtype=torch.float64
    )


def energy_in_loops(memory: PatternMemory, states):
    """Eq. 2, one state at a time, by numpy's log-add-exp."""
    found = np.zeros(states.shape[:-1])
    for b, h, s in np.ndindex(found.shape):
        real = slice(None) if memory.mask is None else memory.mask[b]
        x, xi, beta = memory.patterns[b, h][real].numpy(), states[b, h, s].numpy(), float(memory.beta[h])
        largest = max(np.linalg.norm(row) for row in x)
        lse = np.logaddexp.reduce(beta * (x @ xi)) / beta
        found[b, h, s] = -lse + xi @ xi / 2 + math.log(len(x)) / beta + largest**2 / 2
    return found


def updated(memory: PatternMemory, states):
    """Eq. 3 by PyTorch's own attention: softmax(β ξ Xᵀ) X."""
    mask = None if memory.mask is None else memory.mask[:, None, None, :]
    queries = states * memory.beta[:, None, None]
    return scaled_dot_product_attention(queries, memory.patterns, memory.patterns, mask, scale=1.0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [2**20, 40])
def test_states_and_energies_are_the_papers(masked, rows, monkeypatch):
    monkeypatch.setattr(blocks, "SCORES_AT_ONCE", rows)
    memory, states = drawn(masked=masked)
    found = retrieve(memory, states, 4, association=True)
    assert found.energy.shape == (2, 3, 5, 5)
    for step in range(4):
        np.testing.assert_allclose(found.energy[..., step], energy_in_loops(memory, states), rtol=0, atol=1e-10)
        before, states = states, updated(memory, states)
    np.testing.assert_allclose(found.energy[..., 4], energy_in_loops(memory, states), rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.states, states, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.change, (states - before).norm(dim=-1), rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.association @ memory.patterns, states, rtol=0, atol=1e-10)
    assert (found.steps == 4).all()


@pytest.mark.parametrize("rows", [2**20, 40])
def test_each_state_stops_when_its_own_update_is_small(rows, monkeypatch):
    monkeypatch.setattr(blocks, "SCORES_AT_ONCE", rows)
    memory, states = drawn(masked=True)
    eps = 1e-3
    found = retrieve(memory, states, 200, eps, association=True)
    assert found.energy.shape[-1] == found.steps.max() + 1
    assert len(set(found.steps.flatten().tolist())) > 1
    for b, h, s in np.ndindex(*found.steps.shape):
        one = PatternMemory(memory.patterns[b : b + 1], memory.beta, memory.mask[b : b + 1])
        x, taken, change = states[b : b + 1, :, s : s + 1], 0, math.inf
        while change >= eps:
            before, x, taken = x, updated(one, x), taken + 1
            change = float((x - before)[0, h].norm())
        assert taken == found.steps[b, h, s]
        assert change == pytest.approx(float(found.change[b, h, s]), abs=1e-10)
        np.testing.assert_allclose(found.states[b, h, s], x[0, h, 0], rtol=0, atol=1e-10)
        ends = found.energy[b, h, s, taken:]
        np.testing.assert_allclose(ends, ends[0].expand_as(ends), rtol=0, atol=1e-12)
        weights = found.association[b, h, s] @ memory.patterns[b, h]
        np.testing.assert_allclose(weights, found.states[b, h, s], rtol=0, atol=1e-10)


@given(
    seed=st.integers(0, 2**32), beta=st.floats(1e-3, 1e3), scale=st.floats(1e-3, 30.0), patterns=st.integers(1, 9),
    masked=st.booleans(),
)  # fmt: skip
@settings(derandomize=True, database=None, deadline=None, max_examples=80)
def test_energy_never_rises_and_stays_between_0_and_2_m_squared(seed, beta, scale, patterns, masked):
    """Theorem 1 and lemma A1; the upper bound holds inside the sphere of the largest pattern, where updates lead."""
    memory, states = drawn(seed, patterns=patterns, masked=masked)
    memory = PatternMemory(memory.patterns * scale, torch.full_like(memory.beta, beta), memory.mask)
    found = retrieve(memory, states * scale, 12).energy
    largest = memory.patterns.norm(dim=-1).amax(-1)[..., None, None] ** 2
    slack = 1e-12 * (1 + found.abs().amax())
    assert (found.diff(dim=-1) <= slack).all()
    assert (found >= -slack).all()
    assert (found[..., 1:] <= 2 * largest + slack).all()


def test_well_separated_patterns_are_retrieved_in_one_step():
    make = torch.Generator().manual_seed(1)
    width, count = 64, 100
    patterns = torch.randn(1, 1, count, width, generator=make, dtype=torch.float64)
    noisy = patterns + 0.2 * torch.randn(patterns.shape, generator=make, dtype=torch.float64)
    found = retrieve(PatternMemory(patterns, torch.tensor([2.0], dtype=torch.float64)), noisy, 1)
    np.testing.assert_allclose(found.states, patterns, rtol=0, atol=1e-10)
    assert (found.pattern[0, 0] == torch.arange(count)).all()
    assert (found.weight > 1 - 1e-10).all()
    assert (found.distance < 1e-9).all()
    np.testing.assert_allclose(found.similarity, 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.mixed, 1, rtol=0, atol=1e-8)


def test_a_small_beta_averages_over_all_and_twins_give_their_mean():
    memory, states = drawn(batch=1, heads=1, patterns=8)
    flat = retrieve(PatternMemory(memory.patterns, torch.tensor([1e-9], dtype=torch.float64)), states, 1)
    np.testing.assert_allclose(flat.mixed, 8, rtol=0, atol=1e-6)
    np.testing.assert_allclose(flat.states[0, 0, 0], memory.patterns[0, 0].mean(0), rtol=0, atol=1e-8)
    twins = torch.tensor([[[[10.0, 1.0], [10.0, -1.0], [-10.0, 0.0]]]], dtype=torch.float64)
    between = retrieve(
        PatternMemory(twins, torch.tensor([0.5], dtype=torch.float64)), twins.new_tensor([[[[9.0, 0.0]]]]), 3
    )
    np.testing.assert_allclose(between.states, [[[[10.0, 0.0]]]], rtol=0, atol=1e-10)
    assert float(between.mixed) == pytest.approx(2)
    assert float(between.weight) == pytest.approx(0.5)


def test_a_state_that_is_zero_has_no_direction_and_none_is_fine():
    opposite = torch.tensor([[[[1.0, 0.0], [-1.0, 0.0]]]], dtype=torch.float64)
    memory = PatternMemory(opposite, torch.ones(1, dtype=torch.float64))
    found = retrieve(memory, torch.zeros(1, 1, 1, 2, dtype=torch.float64), 5, 1e-9)
    assert (float(found.similarity), float(found.distance), int(found.steps)) == (0, 1, 1)
    none = retrieve(memory, torch.zeros(1, 1, 0, 2, dtype=torch.float64), 5, 1e-9)
    assert (none.states.shape, none.energy.shape) == ((1, 1, 0, 2), (1, 1, 0, 1))


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_flops_grow_with_the_steps():
    many = RetrievalSizes(1, 8, 4096, 4096, 64, 100, 4, DOT_PRODUCTS)
    update = 4 * 8 * 4096 * 4096 * 64
    assert 100 * update < retrieval_flops(many) < 1.2 * 101 * update


def test_projections_are_counted():
    plain = RetrievalSizes(2, 4, 50, 60, 8, 1, 4, DOT_PRODUCTS)
    widths = {"state_width": 10, "stored_width": 12, "output_width": 6}
    layer = RetrievalSizes(2, 4, 50, 60, 8, 1, 4, DOT_PRODUCTS, merged=True, **widths)
    products = 2 * 2 * 4 * 8 * (50 * 10 + 60 * 12 + 50 * 6)
    assert retrieval_flops(layer) - retrieval_flops(plain) == products
