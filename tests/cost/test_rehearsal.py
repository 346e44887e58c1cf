"""Rehearsed passes: what is told of operations against real ones, a few pieces against all, and what it loads."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from tests.cost.peaks import filled, peaks, run
from tests.cost.test_peaks import QUICK, SLOW, TAPS, passes
from tests.cost.workloads import METHODS, approximate, gradients_of, gradients_seen, module, raw
from torch.utils._python_dispatch import TorchDispatchMode

from attention_contract.spec import Additive, AnyOf, AttentionSpec, GlobalTokens, SlidingWindow
from attention_service.core.slices import phase
from attention_service.cost import Rates, Roofline, input_bytes, rehearse
from attention_service.cost.meta_results import answer
from attention_service.cost.rehearsal import ROUNDING
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.kernel_choice import cost_of
from attention_service.runtime.planning.rehearsals import seen


class Compared(TorchDispatchMode):
    """Holds what is told of each operation of a real pass against what it answers."""

    def __init__(self):
        super().__init__()
        self.names, self.wrong = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = answer(func, args, dict(kwargs or {}))
        if found is not None and not isinstance(found, float):  # but where a number is read
            self.names.add(str(func))
            pairs = zip(out, found, strict=True) if isinstance(out, tuple | list) else [(out, found)]
            self.wrong += [(str(func), lies(x), lies(y)) for x, y in pairs if lies(x) != lies(y)]
        return out


def lies(x):
    """Shape, dtype, and strides where they mean something."""
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] if x.numel() else []
    return tuple(x.shape), x.dtype, strides


QUICKEST = [
    "bfloat16",
    "decode",
    "entmax15",
    "rope",
    "every tap",
    "linformer",
    "nystrom",
    "gated delta",
    "linear: state",
]
"""Requests that have, among them, every operation of the others."""


@pytest.mark.sampled(name=2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICKEST else pytest.mark.slow) for name in QUICK | SLOW]
)
def test_results_on_the_meta_device_are_those_of_the_operations(name):
    with Compared() as compared:
        for each in passes(name):
            if each.way == "second" or name in TAPS:
                each.run()
    assert not compared.wrong
    assert len(compared.names) > 2


def test_what_is_held_and_what_comes_and_goes_is_counted():
    def run():
        phase("one", "x")
        x = torch.empty(1000, device="meta")  # 4,000 bytes
        phase(None, "others")
        y = x + 1  # 8,000
        z = y.double()  # 16,000
        del y  # 12,000
        z = z * x  # beside it x in float64, and the answer: 28,000
        z.view(10, 100)
        phase("another", "others")  # x and z, of which there are two for a moment
        del x

    one = {"x": 4000, "others": 16000, "workspace": 8000}
    found = rehearse(run)
    assert found.phases == {"inputs": {}, "one": one, "another": {"x": 4000, "others": 8000}}
    assert found.peak_bytes == sum(one.values()) + ROUNDING
    assert found.of("one", "others").operations == found.total().operations == 3


def test_what_has_a_number_for_each_pair_is_kept_apart_and_products_are_counted():
    def run():
        phase(None, "by_token", "by_pair")
        q, k = (torch.empty(2, 30, 8, device="meta") for _ in range(2))
        x = q @ k.mT
        del x

    found = rehearse(run, pairs=(30, 30))
    assert found.phases == {"inputs": {"by_token": 2 * 4 * 2 * 30 * 8, "by_pair": 4 * 2 * 30 * 30}}
    assert found.total().products == 2 * 2 * 30 * 30 * 8


LONG = {name: approximate(name, batch=1, heads=2, kv_heads=1, queries=4000, new_keys=4000) for name in METHODS}
ADDITIVE = AttentionSpec(score=Additive(hidden=64))
LONG["additive"] = raw(ADDITIVE, batch=1, kv_heads=2, head_dim=32, value_dim=32, queries=400, new_keys=300)
FEW = ["performer, causal", "additive"]


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LONG])
def test_a_few_of_many_equal_pieces_tell_of_all(name):
    bound = LONG[name]
    kernel = "materialized" if name == "additive" else bound.spec.method.name
    whole = seen(bound, kernel, partial(gradients_of, twice=True), whole=True)
    few = gradients_seen(bound, kernel, twice=True)
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)
    assert few.total().moved == pytest.approx(whole.total().moved, rel=0.02)


APART = AnyOf(of=[SlidingWindow(left=40, right=40), GlobalTokens(positions=[0, 1, 150], projections="separate")])


@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized"])
def test_the_places_of_sequences_tell_which_queries_are_projected_apart(kernel):
    bound = module(AttentionSpec(masks=[APART]), queries=300, new_keys=300, offsets=(-20, 140))
    real = filled(bound)
    actual = peaks([lambda: run(gradients_of(real, kernel))])[0]
    over = 0.25 if kernel == "blocked" else 0.01  # a few of its blocks are rehearsed
    assert 0.99 * actual <= gradients_seen(bound, kernel).peak_bytes <= (1 + over) * actual


@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized", "performer"])
def test_what_needs_far_too_much_is_refused_without_a_rehearsal(kernel):
    spec = METHODS["performer"] if kernel == "performer" else AttentionSpec(masks=[SlidingWindow(left=9)])
    bound = raw(spec, queries=3000, new_keys=3000)
    needed = gradients_seen(bound, kernel).peak_bytes
    device = Device(torch.device("cpu"), "test", 2**34, Roofline(Rates(1e11, 1e10, 1e-5)))
    found = cost_of(bound, kernel, device, 2**20, "gradients", lambda *_: pytest.fail("it was rehearsed"))
    assert 2 * 2**20 < input_bytes(bound) <= found.peak_bytes < needed


@pytest.mark.slow
def test_a_usual_rehearsal_does_not_load_symbolic_shapes():
    """PyTorch's functions for symbolic shapes take a second to load, and 45 MB."""
    program = """
import sys
import torch
from tests.cost.test_peaks import able
from tests.cost.test_rehearsal import QUICK, gradients_seen
x = torch.ones(1, requires_grad=True)
torch.autograd.grad(2 * x, x, torch.ones(1))
before = len(sys.modules)
for name, bound in QUICK.items():
    if bound.spec.method.name == "exact":
        for kernel in able(bound):
            gradients_seen(bound, kernel)
print(len(sys.modules) - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 50  # of 334
