"""The running state in chunks against the rule written out token by token, and what follows from the rule."""

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from attention_contract import spec
from attention_service.core.attention import attend
from attention_service.core.methods import recurrence
from attention_service.core.problem import Problem, RunningInputs

RULES = {
    "sum": spec.Linear(),
    "sum, relu": spec.Linear(features="relu"),
    "sum, not normalized": spec.Linear(features="identity", scale=-0.5),
    "gated": spec.Linear(rule="gated"),
    "gated by feature": spec.Linear(rule="gated", features="elu"),
    "gated, not normalized": spec.Linear(rule="gated", normalize=False),
    "delta": spec.Linear(rule="delta"),
    "delta, identity": spec.Linear(rule="delta", features="identity"),
    "gated delta": spec.Linear(rule="gated_delta", scale=2.0),
    "gated delta by feature": spec.Linear(rule="gated_delta"),
}
FEATURES = {
    "elu": lambda x: torch.where(x > 0, x + 1, x.exp()),
    "relu": lambda x: x.clamp(min=0),
    "identity": lambda x: x,
    "l2": lambda x: x / (x.square().sum() + 1e-6).sqrt(),
}
WIDTH, VALUE_WIDTH = 3, 2


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that a few tokens are many chunks."""
    chunked(monkeypatch, 4, 6, 2)


def chunked(monkeypatch, chunk, block, fine):
    monkeypatch.setattr(recurrence.StateRule.__init__, "__defaults__", (chunk, block))
    monkeypatch.setattr(recurrence, "FINE_CHUNK", fine)


def problem_of(name, queries=11, keys=11, seed=0, *, causal=True, state=True, wanted=True, **more) -> Problem:
    """Two sequences, four query heads that read two key/value heads; everything that the rule reads is drawn."""
    generator = torch.Generator().manual_seed(seed)
    options = RULES[name]

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    fine = WIDTH if "feature" in name else 1
    given = RunningInputs(
        normal(2, 2, keys, fine).mul(3).sigmoid().log() if "gated" in options.rule else None,
        normal(2, 2, keys, 1).sigmoid() if "delta" in options.rule else None,
        normal(2, 2, WIDTH, VALUE_WIDTH) if state else None,
        normal(2, 2, WIDTH).abs() + 1 if state and options.normalized else None,
        wanted,
    )
    masks = [spec.Causal(**more)] if causal else []
    described = spec.AttentionSpec(method=options, masks=masks)
    q, k, v = normal(2, 4, queries, WIDTH), normal(2, 2, keys, WIDTH), normal(2, 2, keys, VALUE_WIDTH)
    return Problem(q, k, v, described, recurrent=given)


def token_by_token(problem: Problem, reach: int, real=None):
    """The rule as it is written, one key after the other; query i reads the state after key i + reach."""
    options, given = problem.spec.method, problem.recurrent
    phi = FEATURES[options.map]
    context = torch.zeros(*problem.q.shape[:3], VALUE_WIDTH, dtype=torch.float64)
    states, sums = torch.zeros(2, 2, WIDTH, VALUE_WIDTH).double(), torch.zeros(2, 2, WIDTH).double()
    for b in range(2):
        for h in range(2):
            state = torch.zeros(WIDTH, VALUE_WIDTH).double() if given.state is None else given.state[b, h]
            total = torch.zeros(WIDTH).double() if given.normalizer is None else given.normalizer[b, h]
            seen = [(state, total)]
            for j in range(problem.k.shape[2]):
                if real is None or real[b, j]:
                    key, value = phi(problem.k[b, h, j]), problem.v[b, h, j]
                    if given.log_gate is not None:
                        gate = given.log_gate[b, h, j].exp()
                        state, total = gate[:, None] * state, gate * total
                    if given.beta is not None:
                        value = given.beta[b, h, j] * (value - key @ state)
                    state, total = state + torch.outer(key, value), total + key
                seen.append((state, total))
            states[b, h], sums[b, h] = state, total
            for i in range(problem.q.shape[2]):
                state, total = seen[max(0, min(i + reach + 1, problem.k.shape[2]))]
                for g in (2 * h, 2 * h + 1):
                    query = phi(problem.q[b, g, i]) * (1 if options.scale is None else options.scale)
                    divisor = query @ total if options.normalized else 1
                    context[b, g, i] = query @ state / divisor if divisor else 0
    return context, states, sums


def assert_follows_the_rule(problem, reach, real=None):
    found = attend(problem)
    context, state, total = token_by_token(problem, reach, real)
    torch.testing.assert_close(found.context, context, rtol=0, atol=1e-11)
    torch.testing.assert_close(found.state["final_state"], state, rtol=0, atol=1e-11)
    assert ("final_normalizer" in found.state) == problem.spec.method.normalized
    if problem.spec.method.normalized:
        torch.testing.assert_close(found.state["final_normalizer"], total, rtol=0, atol=1e-11)


@pytest.mark.parametrize("state", [False, True], ids=["from nothing", "from a state"])
@pytest.mark.parametrize("name", RULES)
def test_chunks_follow_the_rule(name, state):
    assert_follows_the_rule(problem_of(name, state=state), 0)


@pytest.mark.parametrize(("queries", "keys"), [(5, 11), (11, 5), (1, 9), (9, 1), (0, 5), (5, 0)])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("name", ["sum", "gated by feature", "gated delta"])
def test_more_keys_than_queries_and_fewer(name, align, queries, keys):
    problem = problem_of(name, queries, keys, align=align)
    assert_follows_the_rule(problem, keys - queries if align == "bottom_right" else 0)


@pytest.mark.parametrize("offset", [-20, -3, 2, 20])
@pytest.mark.parametrize("name", ["sum", "gated", "delta"])
def test_offsets_move_the_queries(name, offset):
    problem = replace(problem_of(name), offsets=torch.tensor([offset, offset]))
    assert_follows_the_rule(problem, offset)


def test_without_a_mask_every_query_reads_the_last_state():
    assert_follows_the_rule(problem_of("sum", 7, 11, causal=False), 11)
    assert_follows_the_rule(problem_of("sum, not normalized", 7, 11, causal=False), 11)


@pytest.mark.parametrize("name", RULES)
def test_padding_neither_writes_nor_fades(name):
    generator = torch.Generator().manual_seed(1)
    real = torch.rand(2, 11, generator=generator) > 0.4
    problem = problem_of(name)
    problem = replace(problem, key_mask=real)
    assert_follows_the_rule(problem, 0, real)
    poisoned = torch.where(real[:, None, :, None], 0, torch.nan)
    spoilt = replace(problem, k=problem.k + poisoned, v=problem.v + poisoned)
    torch.testing.assert_close(attend(spoilt).context, attend(problem).context, rtol=0, atol=0)


def part(problem, start, stop, found=None):
    """The tokens from start to stop, begun at the state that was found before them."""
    given = problem.recurrent

    def cut(x):
        return x if x is None else x[:, :, start:stop]

    state = given.state if found is None else found["final_state"]
    total = given.normalizer if found is None else found.get("final_normalizer")
    running_ = RunningInputs(cut(given.log_gate), cut(given.beta), state, total, True)
    return replace(problem, q=cut(problem.q), k=cut(problem.k), v=cut(problem.v), recurrent=running_)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.lists(st.integers(0, 13), max_size=4), st.integers(0, 100))
def test_a_sequence_in_parts_is_the_whole(name, cuts, seed):
    problem = problem_of(name, 13, 13, seed)
    whole = attend(problem)
    contexts, found = [], None
    ends = sorted({0, 13, *cuts})
    for start, stop in pairwise(ends):
        step = attend(part(problem, start, stop, found))
        contexts.append(step.context)
        found = step.state
    torch.testing.assert_close(torch.cat(contexts, 2), whole.context, rtol=1e-9, atol=1e-10)
    for each, state in whole.state.items():
        torch.testing.assert_close(found[each], state, rtol=1e-9, atol=1e-10)


@pytest.mark.sampled(name=5)
@pytest.mark.parametrize("name", RULES)
def test_gradients_through_everything(name):
    problem = problem_of(name, 6, 7)
    given = problem.recurrent
    fields = ("log_gate", "beta", "state", "normalizer")
    extra = [getattr(given, field) for field in fields if getattr(given, field) is not None]

    def outputs(q, k, v, *rest):
        rest = list(rest)
        filled = {field: rest.pop(0) if getattr(given, field) is not None else None for field in fields}
        found = attend(replace(problem, q=q, k=k, v=v, recurrent=RunningInputs(**filled, wanted=True)))
        return found.context, *found.state.values()

    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v, *extra)]
    assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True)


@pytest.mark.parametrize("name", ["gated", "gated by feature", "gated delta"])
def test_gates_close_to_zero_overflow_nothing(name):
    problem = problem_of(name, 40, 40, state=False)
    closed = torch.full_like(problem.recurrent.log_gate, -500.0)
    found = attend(replace(problem, recurrent=replace(problem.recurrent, log_gate=closed)))
    assert found.context.isfinite().all()
    if name == "gated":  # nothing is left but the token's own value
        torch.testing.assert_close(found.context, problem.v.repeat_interleave(2, 1), rtol=0, atol=1e-12)
