"""Rehearsed passes: what is told of operations against real ones, a few pieces against all, and what it loads."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.cost.peaks import Request, peaks
from tests.cost.test_peaks import QUICK, SLOW, WORKLOADS, passes
from tests.cost.workloads import METHODS, approximate, module
from torch.utils._python_dispatch import TorchDispatchMode

from attention_contract.spec import Additive, AnyOf, AttentionSpec, GlobalTokens, SlidingWindow
from attention_service.cost import gradient_peak_bytes, input_bytes
from attention_service.cost.extrapolation import in_pieces
from attention_service.cost.gradient_memory import _rehearsed, names_of
from attention_service.cost.memory_phases import Phase, peak_of
from attention_service.cost.meta_results import answer
from attention_service.cost.rehearsal import most_held


class Compared(TorchDispatchMode):
    """Holds what is told of each operation of a real pass against what it answers."""

    def __init__(self):
        super().__init__()
        self.told, self.wrong = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = answer(func, args, dict(kwargs or {}))
        if found is not None and not isinstance(found, float):  # but where a number is read
            self.told.add(str(func))
            pairs = zip(out, found, strict=True) if isinstance(out, tuple | list) else [(out, found)]
            self.wrong += [(str(func), lies(x), lies(y)) for x, y in pairs if lies(x) != lies(y)]
        return out


def lies(x):
    """Shape, dtype, and strides where they mean something."""
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] if x.numel() else []
    return tuple(x.shape), x.dtype, strides


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_results_on_the_meta_device_are_those_of_the_operations(name):
    work = WORKLOADS[name]
    with Compared() as compared:
        for each in passes(work):
            if each.way == "second" or work.taps != frozenset({"output"}):
                each.run()
    assert not compared.wrong
    assert len(compared.told) > 2


def test_what_is_held_and_what_comes_and_goes_is_counted():
    def run(account):
        account.begin("one")
        account.call("x")
        x = torch.empty(1000, device="meta")  # 4,000 bytes
        account.call("others")
        y = x + 1  # 8,000
        z = y.double()  # 16,000
        del y  # 12,000
        z = z * x  # beside it x in float64, and the answer: 28,000
        z.view(10, 100)
        account.begin("another")  # x and z, of which there are two for a moment
        del x

    one = {"x": 4000, "others": 16000, "workspace": 8000}
    assert most_held(run) == {"one": one, "another": {"x": 4000, "others": 8000}}


def test_what_has_a_number_for_each_pair_and_what_is_worked_in_is_told_apart():
    def run(account):
        account.call("by_token", "by_pair")
        q, k = (torch.empty(2, 30, 8, device="meta") for _ in range(2))
        x = q @ k.mT
        account.take(100)
        del x

    held = {"by_token": 2 * 4 * 2 * 30 * 8, "by_pair": 4 * 2 * 30 * 30, "workspace": 100}
    assert most_held(run, pairs=(30, 30)) == {"": held}


LONG = {name: approximate(name, batch=1, heads=2, kv_heads=1, queries=4000, keys=4000) for name in METHODS}
LONG["additive"] = replace(
    approximate("linear", batch=1, kv_heads=2, queries=400, keys=300), spec=AttentionSpec(score=Additive(hidden=64))
)
FEW = ["linear, causal", "gated", "performer, causal", "additive"]


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LONG])
def test_a_few_of_many_equal_pieces_tell_of_all(name):
    work = LONG[name]
    names = names_of(work)
    whole = peak_of(tuple(Phase(*each) for each in _rehearsed(work, "materialized", tuple(names), True, False).items()))
    assert gradient_peak_bytes(work, "materialized", twice=True) == pytest.approx(whole, rel=0.02)
    if name in {"linear, causal", "delta", "performer, causal", "additive"}:
        assert in_pieces(work, twice=True)


APART = AnyOf(of=[SlidingWindow(left=40, right=40), GlobalTokens(positions=[0, 1, 150], projections="separate")])


@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized"])
def test_the_places_of_sequences_tell_which_queries_are_projected_apart(kernel):
    offsets = {"batched_offsets": True, "batched_places": True, "offsets": (-20, 140)}
    work = module(queries=300, keys=300, spec=AttentionSpec(masks=[APART]), **offsets)
    actual = peaks([partial(Request(work).backward, kernel)])[0]
    over = 0.25 if kernel == "blocked" else 0.01  # a few of its blocks are rehearsed
    assert 0.99 * actual <= gradient_peak_bytes(work, kernel) <= (1 + over) * actual


@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized", "performer"])
def test_what_needs_far_too_much_is_told_without_a_rehearsal(kernel, monkeypatch):
    spec = METHODS["performer"] if kernel == "performer" else AttentionSpec(masks=[SlidingWindow(left=9)])
    work = approximate("linear", spec=spec, queries=3000, keys=3000)
    needed = gradient_peak_bytes(work, kernel)
    monkeypatch.setattr("attention_service.cost.gradient_memory.gradient_phases", None)
    least = gradient_peak_bytes(work, kernel, room=2**20)
    assert 2 * 2**20 < input_bytes(work) <= least < needed


@pytest.mark.slow
def test_a_rehearsal_loads_nothing_that_gradients_do_not():
    """PyTorch's compiler takes a second to load, and 60 MB."""
    program = """
import sys
import torch
from tests.cost.test_rehearsal import LONG, gradient_peak_bytes
x = torch.ones(1, requires_grad=True)
torch.autograd.grad(2 * x, x, torch.ones(1))
before = len(sys.modules)
for work in LONG.values():
    gradient_peak_bytes(work, "materialized", twice=True, checked=True)
print(len(sys.modules) - before)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(told.stdout) == 0
