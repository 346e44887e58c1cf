"""The core against bare PyTorch: what our own layer costs, and what taps cost."""

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attention_contract.spec import AttentionSpec
from attention_service.core.attention import attend
from attention_service.core.cost import Workload, flops
from attention_service.core.types import Problem, Selection
from attention_service.runtime.device import Device
from benchmarks.measure import Case

HEADS, WIDTH = 8, 64


def cases(device: Device) -> Iterator[Case]:
    """Self-attention at several lengths: each kernel against SDPA, and one row of weights beside the output."""
    causal = AttentionSpec.model_validate({"masks": [{"name": "causal"}]})
    for keys in (256, 1024, 2048):
        q, k, v = (torch.randn(1, HEADS, keys, WIDTH, device=device.torch) for _ in range(3))
        for label, spec in (("dense", AttentionSpec()), ("causal", causal)):
            problem = Problem(q, k, v, spec)
            for kernel in ("fused", "materialized"):
                work = _workload(keys, spec, device)
                yield Case(
                    f"{kernel}, {label}, n = {keys}",
                    lambda problem=problem, kernel=kernel: attend(problem, kernel=kernel),
                    "bare SDPA",
                    lambda q=q, k=k, v=v, label=label: sdpa(q, k, v, is_causal=label == "causal"),
                    flops=flops(work, masked=False).total,
                    predicted_ms=device.clock.forward(work, kernel).median * 1e3,
                )
        problem = Problem(q, k, v)
        one = Selection(heads=(0,), queries=(keys - 1,))
        yield Case(
            f"fused with one row of weights, n = {keys}",
            lambda problem=problem, one=one: attend(problem, ("weights",), one),
            "without it",
            lambda problem=problem: attend(problem),
        )


def _workload(keys: int, spec: AttentionSpec, device: Device) -> Workload:
    return Workload(
        batch=1, queries=keys, keys=keys, heads=HEADS, kv_heads=HEADS, head_dim=WIDTH, value_dim=WIDTH, itemsize=4,
        spec=spec, threads=device.threads,
    )  # fmt: skip
