"""What holds for every attention, tried on drawn shapes and masks."""

import math
from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.conftest import SPECS, drawn_masks

from attention_contract.spec import AttentionSpec
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.problem import Selection
from attention_service.core.stages import taps_of

HERE = [entry.name for entry in KERNELS if not unsuitable(entry.name, AttentionSpec(), torch.float64, Needs())]
kernels = st.sampled_from(HERE)
specs = st.sampled_from([*SPECS.values()])
kernels_and_specs = st.tuples(kernels, specs).filter(lambda drawn: not unsuitable(*drawn, torch.float64, Needs()))


sizes = st.integers(1, 6)
seeds = st.integers(0, 2**31)
masks = st.lists(drawn_masks(), max_size=2)
tried = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@tried
@given(
    drawn=kernels_and_specs,
    queries=sizes,
    keys=sizes,
    seed=seeds,
    chosen=masks,
    rubbish=st.sampled_from([math.nan, math.inf, 3]),
)
def test_padding_has_no_influence_whatever_it_holds(make_problem, drawn, queries, keys, seed, chosen, rubbish):
    kernel, spec = drawn
    real = torch.rand(2, keys, generator=torch.Generator().manual_seed(seed)) > 0.5
    spec = spec.model_copy(update={"masks": chosen})
    problem = make_problem(queries=queries, keys=keys, seed=seed, key_mask=real, spec=spec)

    def outcome(each):
        leaves = [x.clone().requires_grad_() for x in (each.q, each.k, each.v)]
        attended = attend(replace(each, q=leaves[0], k=leaves[1], v=leaves[2]), ("weights", "scores"), kernel=kernel)
        return attended.context, *attended.taps.values(), *torch.autograd.grad(attended.context.sum(), leaves)

    padded = ~real[:, None, :, None]
    dirty = replace(problem, k=problem.k.masked_fill(padded, rubbish), v=problem.v.masked_fill(padded, rubbish))
    for found, expected in zip(outcome(dirty), outcome(problem), strict=True):
        assert found.equal(expected)
        assert not found.isnan().any()


@tried
@given(
    drawn=kernels_and_specs,
    queries=sizes,
    keys=sizes,
    seed=seeds,
    chosen=masks,
    which=st.sampled_from(["k", "v"]),
    rubbish=st.sampled_from([math.nan, math.inf, -math.inf]),
    masked=st.booleans(),
)
def test_what_a_query_may_not_look_at_has_no_influence_on_it(
    make_problem, drawn, queries, keys, seed, chosen, which, rubbish, masked
):
    """One key of one sequence and head holds rubbish: who sees it gets NaN, nobody else notices."""
    kernel, spec = drawn
    mask = torch.rand(queries, keys, generator=torch.Generator().manual_seed(seed)) > 0.4 if masked else None
    spec = spec.model_copy(update={"masks": chosen})
    problem = make_problem(heads=4, kv_heads=2, queries=queries, keys=keys, seed=seed, mask=mask, spec=spec)
    at = (1, 0, seed % keys, 0)
    dirty = getattr(problem, which).clone()
    dirty[at] = rubbish

    def outcome(each):
        leaf = each.q.clone().requires_grad_()
        attended = attend(replace(each, q=leaf), ("weights", "masked_scores"), kernel=kernel)
        rows = attended.context[~sees]
        return rows, attended.taps["weights"][~sees], torch.autograd.grad(rows.sum(), leaf)[0][~sees]

    visible = attend(problem, ("masked_scores",), kernel="materialized").taps["masked_scores"] > -math.inf
    sees = torch.zeros(2, 4, queries, dtype=torch.bool)
    sees[1, :2] = visible[1, :2, :, seed % keys]
    for found, expected in zip(outcome(replace(problem, **{which: dirty})), outcome(problem), strict=True):
        close(found, expected)
        assert not found.isnan().any()
    context = attend(replace(problem, **{which: dirty}), kernel=kernel).context
    assert context[sees].isnan().all()


@tried
@given(drawn=kernels_and_specs, queries=sizes, keys=sizes, seed=seeds, chosen=masks, data=st.data())
def test_a_selection_is_a_slice_and_leaves_the_context(make_problem, drawn, queries, keys, seed, chosen, data):
    kernel, spec = drawn
    spec = spec.model_copy(update={"masks": chosen})
    problem = make_problem(heads=4, kv_heads=2, queries=queries, keys=keys, seed=seed, spec=spec, past=1)
    heads = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3), label="heads")
    rows = data.draw(st.lists(st.integers(0, queries - 1), min_size=1, max_size=3), label="queries")
    taps = taps_of(spec)
    whole = attend(problem, taps, kernel=kernel)
    part = attend(problem, taps, Selection(heads=tuple(heads), queries=tuple(rows)), kernel=kernel)
    for name in set(taps) - {"k", "v"}:
        close(part.taps[name], whole.taps[name][:, heads][:, :, rows])
    for name in ("k", "v"):
        assert part.taps[name].equal(whole.taps[name][:, [head // 2 for head in heads]])
    assert part.context.equal(whole.context)
    assert part.context.equal(attend(problem, (), kernel=kernel).context)
