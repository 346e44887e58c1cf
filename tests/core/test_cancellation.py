"""Cancellation: every kind of long work stops at a checkpoint, and slices give the numbers of the whole."""

import threading
import time

import numpy as np
import pytest
import torch

from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.spec import AttentionSpec
from attention_service.core import multihead, slices
from attention_service.core.attention import attend
from attention_service.core.cancellation import Abandoned, Cancellation, cancellable, checkpoint
from attention_service.core.kernels.fused import cpu_slices
from attention_service.core.problem import Problem


def test_a_checkpoint_raises_in_the_thread_of_the_work_alone():
    given_up, here = Cancellation(), []
    given_up.cancel()
    with cancellable(given_up):
        with pytest.raises(Abandoned):
            checkpoint()
        thread = threading.Thread(target=lambda: here.append(checkpoint()))
        thread.start()
        thread.join()
    assert here == [None]
    checkpoint()


def problem(rng, *, heads=4, kv_heads=2, queries=40, keys=40, dtype=torch.float64, tracked=False, **more):
    shapes = (2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8)
    q, k, v = (torch.from_numpy(rng.standard_normal(shape)).to(dtype).requires_grad_(tracked) for shape in shapes)
    return Problem(q, k, v, **more)


CASES = {
    "dense": {},
    "causal": {"spec": AttentionSpec(masks=[{"name": "causal"}])},
    "causal, fewer keys": {"spec": AttentionSpec(masks=[{"name": "causal"}]), "keys": 23},
    "causal, fewer queries": {"spec": AttentionSpec(masks=[{"name": "causal"}]), "queries": 23},
    "padded": {"key_lengths": torch.tensor([40, 7])},
    "a mask": {"mask": torch.rand(2, 4, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.5},
    "one head": {"heads": 1, "kv_heads": 1},
}


@pytest.mark.parametrize("flops", [1.0, 3e4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_slices_give_the_numbers_and_gradients_of_one_call(rng, monkeypatch, case, flops):
    def run():
        given = problem(np.random.default_rng(0), tracked=True, **case)
        context = attend(given).context
        upstream = torch.from_numpy(np.random.default_rng(1).standard_normal(context.shape))
        return context, *torch.autograd.grad(context, (given.q, given.k, given.v), upstream)

    whole, calls, real = run(), [], cpu_slices.attend
    monkeypatch.setattr(slices, "SLICE_FLOPS", flops / torch.get_num_threads())
    monkeypatch.setattr(cpu_slices, "LEAST_ROWS", 7)
    monkeypatch.setattr(cpu_slices, "attend", lambda *x, **y: calls.append(1) or real(*x, **y))
    for found, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert len(calls) > 1


@pytest.mark.parametrize("tracked", [False, True])
def test_a_projection_in_slices_gives_the_numbers_and_gradients_of_one_product(rng, monkeypatch, tracked):
    def run():
        generator = torch.Generator().manual_seed(0)
        x, weight, bias = (
            torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_(tracked)
            for shape in ((2, 30, 8), (6, 8), (6,))
        )
        found = multihead.linear(x, weight, bias)
        return (found, *torch.autograd.grad(found.square().sum(), (x, weight, bias))) if tracked else (found,)

    whole, calls, real = run(), [], multihead.whole_linear
    monkeypatch.setattr(slices, "SLICE_FLOPS", 500.0 / torch.get_num_threads())
    monkeypatch.setattr(multihead, "whole_linear", lambda *x: calls.append(1) or real(*x))
    for found, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(found, expected)
    assert len(calls) > 1


WORK = {
    "fused": (RawForwardRequest(query=np.zeros((1, 4, 9000, 64), np.float32)), "fused"),
    "fused, causal": (
        RawForwardRequest(query=np.zeros((1, 4, 9000, 64), np.float32), spec={"masks": [{"name": "causal"}]}),
        "fused",
    ),
    "blocked": (RawForwardRequest(query=np.zeros((1, 4, 9000, 64), np.float32)), "blocked"),
    "linear": (
        RawForwardRequest(query=np.zeros((1, 4, 60_000, 64), np.float32), spec={"method": {"name": "linear"}}),
        "linear",
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("request_", "kernel"), WORK.values(), ids=WORK)
def test_work_that_is_given_up_stops_soon(request_, kernel, gradient):
    q = torch.from_numpy(request_.query).requires_grad_(gradient)
    given_up, begun, ended = Cancellation(), threading.Event(), []

    def work():
        with cancellable(given_up):
            begun.set()
            try:
                while True:
                    context = attend(Problem(q, q, q, request_.spec), kernel=kernel).context
                    if gradient:
                        torch.autograd.grad(context.sum(), q)
            except Abandoned:
                ended.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    time.sleep(0.3)
    given_up.cancel()
    since = time.monotonic()
    thread.join(10)
    assert ended
    assert ended[0] - since < 9.0  # a tenth of a second on a machine that does nothing else
