"""A retrieval bound and planned: its sizes by layout, and its peak against what its job allocates."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from attention_contract.schemas.analyses.hopfield import HopfieldRequest
from attention_service.cost import Rates, Roofline
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import hopfield

DEVICE = Device(torch.device("cpu"), "a cpu", 2**34, Roofline(Rates(1e11, 1e10, 1e-5)))


def request(*shapes, dtype=np.float32, **fields):
    rng = np.random.default_rng(0)
    stored, states = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return HopfieldRequest(stored=stored, states=states, **fields)


def matrix(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32) / 8


@st.composite
def drawn(draw):
    """A request of any layout, with whatever fields it may have."""
    size = st.integers(1, 4)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, heads, states, patterns, width, out = (draw(size) for _ in range(6))
    layout = draw(st.sampled_from(["whole", "unbatched", "alone", "merged", "merged, unbatched", "layer"]))
    fields = {"return_association": True, "steps": draw(st.integers(1, 5))}
    if draw(st.booleans()):
        fields = {"return_association": True, "eps": draw(st.floats(1e-6, 1.0)), "max_steps": draw(st.integers(1, 9))}
    heads, batch = (1 if layout == "alone" else heads), (batch if layout in {"whole", "merged", "layer"} else 1)
    widths = [width, width]
    if layout == "layer":
        widths = [draw(size), draw(size)]
        fields["projections"] = {
            "stored": rng.normal(size=(heads * width, widths[0])),
            "state": rng.normal(size=(heads * width, widths[1])),
        }
    merged = layout in {"merged", "merged, unbatched", "layer"}
    shapes = [
        (batch, length, wide * (heads if layout != "layer" else 1)) if merged else (batch, heads, length, wide)
        for length, wide in zip((patterns, states), widths, strict=True)
    ]
    stored, start = (rng.normal(size=shape) for shape in shapes)
    if merged:
        fields["num_heads"] = heads
    if draw(st.booleans()):
        fields["projections"] = fields.get("projections", {}) | {"output": rng.normal(size=(heads * out, width))}
    if draw(st.booleans()):
        fields["beta"] = rng.uniform(0.1, 3, heads) if draw(st.booleans()) else rng.uniform(0.1, 3)
    if draw(st.booleans()):
        mask = rng.random((batch, patterns)) < 0.6
        mask[:, rng.integers(patterns)] = True
        stored = np.where(mask[..., None] if merged else mask[:, None, :, None], stored, np.nan)
        fields["stored_mask"] = mask
    if layout in {"unbatched", "alone", "merged, unbatched"}:
        stored, start = stored[0], start[0]
        fields |= {"stored_mask": fields["stored_mask"][0]} if "stored_mask" in fields else {}
    if layout == "alone":
        stored, start = stored[0], start[0]
    return HopfieldRequest(stored=stored, states=start, **fields), (batch, heads, states, patterns, width, out)


def one_by_one(request, sizes):
    """Every state for itself, in plain numpy: its end, energies, steps and association."""
    batch, heads, states, patterns, width, out = sizes
    layer = request.projections

    def split(array, weight):
        array = array if array.ndim > 2 or request.num_heads is None else array[None]
        if request.num_heads is None:
            return array.reshape(batch, heads, -1, width)
        array = np.nan_to_num(array) if weight is None else np.nan_to_num(array) @ weight.T
        return array.reshape(batch, -1, heads, width).swapaxes(1, 2)

    stored = split(request.stored, layer and layer.stored)
    start = split(request.states, layer and layer.state)
    mask = np.ones((batch, patterns), bool)
    if request.stored_mask is not None:
        mask = request.stored_mask.reshape(batch, patterns)
    beta = np.broadcast_to(width**-0.5 if request.beta is None else request.beta, (heads,))
    limit = request.steps or request.max_steps
    for b, h, s in np.ndindex(batch, heads, states):
        x, xi, energies, p, change = stored[b, h][mask[b]], start[b, h, s], [], None, np.inf
        for step in range(limit + 1):
            largest = max(row @ row for row in x)
            lse = np.logaddexp.reduce(beta[h] * (x @ xi)) / beta[h]
            energies.append(-lse + xi @ xi / 2 + np.log(len(x)) / beta[h] + largest / 2)
            if step == limit or (request.eps is not None and change < request.eps):
                break
            p = np.exp(beta[h] * (x @ xi - (x @ xi).max()))
            p /= p.sum()
            xi, before = p @ x, xi
            change = np.linalg.norm(xi - before)
        weights = np.zeros(patterns)
        weights[mask[b]] = p
        if layer is not None and layer.output is not None:
            xi = layer.output.reshape(heads, out, width)[h] @ xi
        yield (b, h, s), xi, energies, change, weights


@pytest.mark.slow
@given(drawn())
@settings(derandomize=True, database=None, deadline=None, max_examples=50)
def test_in_every_request_each_state_falls_by_the_formula(case):
    request, sizes = case
    batch, heads, states, _, _, _ = sizes
    found = hopfield.prepare(request, DEVICE).run()
    each = (batch, heads, states)
    ends = found["states"].reshape(batch, states, heads, -1).swapaxes(1, 2) if request.num_heads else found["states"]
    ends, energy, association = (x.reshape(*each, -1) for x in (ends, found["energy"], found["association"]))
    for at, end, energies, change, weights in one_by_one(request, sizes):
        assert found["steps"].reshape(each)[at] == len(energies) - 1
        np.testing.assert_allclose(ends[at], end, rtol=0, atol=1e-10)
        np.testing.assert_allclose(energy[at][: len(energies)], energies, rtol=0, atol=1e-10)
        np.testing.assert_allclose(energy[at][len(energies) :], energies[-1], rtol=0, atol=1e-10)
        np.testing.assert_allclose(association[at], weights, rtol=0, atol=1e-10)
        np.testing.assert_allclose(found["change"].reshape(each)[at], change, rtol=0, atol=1e-10)
        assert found["reached"]["pattern"].reshape(each)[at] == weights.argmax()
        assert found["reached"]["single"].reshape(each)[at] == (weights.max() >= 0.9)


LAYER = {"state": matrix(128, 96), "stored": matrix(128, 64), "output": matrix(64, 32)}
JOBS = {
    "float32": lambda: request((2, 4, 400, 64), (2, 4, 300, 64), steps=3),
    "float64": lambda: request((2, 4, 400, 64), (2, 4, 300, 64), steps=3, dtype=np.float64),
    "float16": lambda: request((2, 4, 400, 64), (2, 4, 300, 64), steps=3, dtype=np.float16),
    "merged": lambda: request((4, 400, 128), (4, 300, 128), num_heads=4, eps=1e-30, max_steps=4),
    "layer": lambda: request((4, 400, 64), (4, 300, 96), num_heads=4, steps=2, projections=LAYER),
    "masked": lambda: request((2, 2, 3000, 64), (2, 2, 9, 64), stored_mask=np.arange(6000).reshape(2, -1) % 3 > 0),
    "association": lambda: request((2, 2, 900, 16), (2, 2, 900, 16), return_association=True),
}


@pytest.mark.sampled(name=3)
@pytest.mark.parametrize("name", JOBS)
def test_the_planned_peak_is_what_the_job_allocates(name):
    job = hopfield.prepare(JOBS[name](), DEVICE.exact())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fields = job.run()
    assert np.isfinite(fields["energy"]).all()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = np.cumsum([event.nbytes() for event in events if event.name() == "[memory]"])
    # A CPU shares the memory of inputs that need no other dtype, where a device would hold copies of them. Those that
    # were multiplied or hidden are gone by the peak.
    came = 0 if name in {"float16", "layer", "masked"} else JOBS[name]().states.nbytes + JOBS[name]().stored.nbytes
    assert 0.98 * (held.max() + came) <= job.plan.peak_bytes <= 1.05 * (held.max() + came)


def test_time_grows_with_the_steps_and_memory_with_neither_steps_nor_pairs():
    def plan(states, steps):
        stored, start = (np.broadcast_to(np.float32(0), (1, 8, length, 64)) for length in (4096, states))
        return hopfield.prepare(HopfieldRequest(stored=stored, states=start, steps=steps), DEVICE.exact()).plan

    one, many, longer = plan(4096, 1), plan(4096, 100), plan(8192, 1)
    assert 30 < many.predicted.median / one.predicted.median < 100
    assert longer.peak_bytes < 1.6 * one.peak_bytes
    assert many.peak_bytes < 1.4 * one.peak_bytes


def test_projections_are_held():
    def plan(width):
        stored, start = (np.broadcast_to(np.float32(0), (2, length, wide)) for length, wide in ((60, width), (50, 10)))
        layer = {"state": matrix(32, 10), "stored": matrix(32, width), "output": matrix(24, 8)}
        request = HopfieldRequest(stored=stored, states=start, num_heads=4, steps=1, projections=layer)
        return hopfield.prepare(request, DEVICE.exact()).plan

    assert plan(10_000).peak_bytes > 4 * 2 * 60 * 10_000 > plan(12).peak_bytes >= 4 * 2 * 4 * 50 * 60
