"""A new score, mask, method or kernel: its options and its class, and nothing else, make it served.

Each test adds an entry to a registry and asks the engine for outputs, gradients and costs by it. A spec that names new
options is the contract's with one union widened: the other file that such an entry touches.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from tests.conftest import asker

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest, KernelUnsuitable
from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.costs.complexity import RawComplexityRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.spec import AttentionSpec, ScaledDot
from attention_service.core.kernels import KERNELS, Kernel, KernelWork, Needs
from attention_service.core.masks import MASKS
from attention_service.core.masks.bands import Band
from attention_service.core.methods import METHODS
from attention_service.core.methods.approximation import Approximation, no_masks
from attention_service.core.methods.base import MethodCost, MethodFlops
from attention_service.core.registry import variants
from attention_service.core.scores import SCORES, Product
from attention_service.cost import Rates, Roofline
from attention_service.engine import Engine
from attention_service.runtime.device.torch_device import Device

FACTS = {"formula": "f", "gradient": "g", "cost": "O(1)", "source": "here"}
LENGTH, HEADS, WIDTH = 12, 2, 4
INPUTS = {
    name: np.random.default_rng(seed).normal(size=(1, HEADS, LENGTH, WIDTH))
    for seed, name in enumerate(("query", "key", "value"))
}


@pytest.fixture(autouse=True)
def _registries_as_before(monkeypatch):
    for registry in (SCORES, MASKS, METHODS, KERNELS):
        list(registry)  # those of installed packages are there
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture
def ask(tmp_path):
    """Ask a fresh engine one question of raw attention."""

    def ask(question, request):
        async def play():
            device = Device(torch.device("cpu"), "test", 2**30, Roofline(Rates(1e10, 1e10, 1e-5)))
            engine = Engine(tmp_path, device)
            await engine.start()
            try:
                return await asker(engine, question)(None, request)
            finally:
                await engine.stop()

        return asyncio.run(play())

    return ask


def answers(ask, spec, kernel=None):
    """The output and its gradients, checked against central differences, and what they cost."""
    output = ask("forward", RawForwardRequest(**INPUTS, spec=spec, kernel=kernel)).output
    found = ask("gradients", RawGradientsRequest(**INPUTS, spec=spec, kernel=kernel, wrt=[*INPUTS], check=True))
    assert all(check.passed for check in found.check.values())
    if kernel is not None:
        exact = ask("gradients", RawGradientsRequest(**INPUTS, spec=spec, kernel="materialized", wrt=[*INPUTS]))
        for name, gradient in found.gradients.items():
            np.testing.assert_allclose(gradient, exact.gradients[name], rtol=0, atol=1e-12)
    shape = {"queries": LENGTH}
    cost = ask(
        "complexity", RawComplexityRequest(shape=shape, num_heads=HEADS, head_dim=WIDTH, spec=spec, kernel=kernel)
    )
    (cost,) = cost.costs
    assert cost.executed_flops > 0
    assert cost.peak_bytes.request > INPUTS["value"].nbytes // 2
    assert cost.predicted.forward.median_ms > 0
    assert kernel in {None, cost.kernel}
    return output, cost


def softmax_attention(scores, allowed=True):
    weights = np.exp(np.where(allowed, scores - scores.max(-1, keepdims=True), -np.inf))
    return weights / weights.sum(-1, keepdims=True) @ INPUTS["value"]


def test_a_score_is_its_options_and_its_class(ask):
    class Doubled(WireModel):
        name: Literal["doubled"] = "doubled"

    class Spec(AttentionSpec):
        score: Doubled | ScaledDot = Doubled()

    @SCORES.register(Doubled, **FACTS)
    @dataclass(frozen=True)
    class _Doubled(Product):
        options: Doubled

        def factors(self, q, k, learned):
            return q, k, 2.0

        def cost(self, widths):
            return SCORES.of(ScaledDot()).cost(widths)

    output, _ = answers(ask, Spec())
    expected = softmax_attention(2 * INPUTS["query"] @ INPUTS["key"].swapaxes(-1, -2))
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-12)
    assert "doubled" in {entry.name for entry in variants()}


@pytest.mark.slow
def test_a_mask_of_known_parts_is_its_options_and_its_class(ask):
    class Neighbours(WireModel):
        name: Literal["neighbours"] = "neighbours"
        reach: int = 1

    class Spec(AttentionSpec):
        masks: list[Neighbours] = Field(default_factory=list)

    @MASKS.register(Neighbours, **FACTS)
    @dataclass(frozen=True)
    class _Neighbours:
        options: Neighbours

        def pattern(self, surplus, keys):
            return Band(low=-self.options.reach, high=self.options.reach)

    output, cost = answers(ask, Spec(masks=[Neighbours(reach=2)]))
    i, j = np.indices((LENGTH, LENGTH))
    scores = INPUTS["query"] @ INPUTS["key"].swapaxes(-1, -2) / np.sqrt(WIDTH)
    np.testing.assert_allclose(output, softmax_attention(scores, abs(i - j) <= 2), rtol=0, atol=1e-12)
    assert cost.allowed_pairs == (abs(i - j) <= 2).sum()
    assert "neighbours" in {entry.name for entry in variants()}


def test_a_method_is_its_options_and_its_class(ask):
    class Unweighted(WireModel):
        name: Literal["unweighted"] = "unweighted"
        scale: float = 1.0

    class Spec(AttentionSpec):
        method: Unweighted = Unweighted()

    @METHODS.register(Unweighted, **FACTS)
    @dataclass(frozen=True)
    class _Unweighted(Approximation):
        """Products of queries and keys, without a softmax: Q (Kᵀ V)."""

        options: Unweighted

        def refuses(self, spec):
            yield from no_masks(spec)

        def orders(self):
            return "n·d²", "d²"

        def cost(self, extent):
            product = 2 * extent.batch * extent.heads * extent.head_dim * extent.value_dim
            forward = MethodFlops(product * extent.keys, product * extent.queries, 0)
            return MethodCost(forward, MethodFlops(2 * forward.scores, 2 * forward.values, 0))

        def _context(self, problem):
            return {"context": self.options.scale * problem.q @ (problem.k.mT @ problem.v)}

    output, cost = answers(ask, Spec(method=Unweighted(scale=0.5)))
    expected = 0.5 * INPUTS["query"] @ (INPUTS["key"].swapaxes(-1, -2) @ INPUTS["value"])
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-12)
    assert cost.kernel == "unweighted"
    assert cost.executed_flops == 2 * HEADS * WIDTH**2 * 2 * LENGTH
    assert "unweighted" in {entry.name for entry in variants()}
    with pytest.raises(InvalidRequest, match=r"spec\.masks: method unweighted"):
        ask("forward", RawForwardRequest(**INPUTS, spec=Spec(masks=[{"name": "causal"}])))


class Plain(Kernel):
    """A plain softmax, written out."""

    def attend(self, problem, taps, edits):
        scores = problem.q @ problem.k.mT / problem.q.shape[-1] ** 0.5
        return {"context": scores.softmax(-1) @ problem.v}

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        if spec != AttentionSpec():
            yield "it knows a plain softmax alone"


def test_a_kernel_is_its_class(ask):
    KERNELS.register("theirs", **FACTS)(Plain)
    output, cost = answers(ask, AttentionSpec(), "theirs")
    scores = INPUTS["query"] @ INPUTS["key"].swapaxes(-1, -2) / np.sqrt(WIDTH)
    np.testing.assert_allclose(output, softmax_attention(scores), rtol=0, atol=1e-12)
    assert cost.kernel == "theirs"
    assert "theirs" in {entry.name for entry in variants()}
    assert ask("forward", RawForwardRequest(**INPUTS)).ran.kernel != "theirs", "it runs only where it is named"
    with pytest.raises(KernelUnsuitable, match="plain softmax alone"):
        ask("forward", RawForwardRequest(**INPUTS, spec=AttentionSpec(softcap=2.0), kernel="theirs"))


@pytest.mark.slow
def test_the_costs_of_a_kernel_are_its_own(ask):
    """Half of the pairs are half of the attention's FLOPs; what it holds is what its code makes."""

    class Half(Plain):
        def executed(self, sizes):
            return KernelWork(sizes.batch * sizes.queries * sizes.keys // 2)

    class Wasteful(Plain):
        def attend(self, problem, taps, edits):
            torch.empty(2**20, dtype=torch.uint8, device=problem.q.device)
            return super().attend(problem, taps, edits)

    for name, made in (("plain", Plain), ("half", Half), ("wasteful", Wasteful)):
        KERNELS.register(name, **FACTS)(made)
    plain, half, wasteful = (answers(ask, AttentionSpec(), name)[1] for name in ("plain", "half", "wasteful"))
    assert plain.executed_flops == plain.forward.dense.total
    assert half.executed_flops == plain.executed_flops // 2
    assert wasteful.peak_bytes.request > plain.peak_bytes.request + 2**19


def test_a_kernel_that_is_not_known_is_refused_with_one_that_is_meant(ask):
    with pytest.raises(InvalidRequest, match="did you mean 'blocked'") as caught:
        ask("forward", RawForwardRequest(**INPUTS, kernel="bloked"))
    assert caught.value.param == "kernel"


def test_a_package_that_is_broken_is_left_out(monkeypatch, caplog):
    class Broken:
        name, value = "broken", "broken_package"

        def load(self):
            raise ImportError("no such module")

    monkeypatch.setattr(KERNELS, "_group", "attention_service.kernels")
    monkeypatch.setattr("attention_service.core.registry.metadata.entry_points", lambda group: [Broken()])
    assert "broken" not in KERNELS
    assert "fused" in KERNELS
    assert "broken of an installed package is left out" in caplog.text
