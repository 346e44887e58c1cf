"""Whole requests through the engine, by the kernel it chooses and by named ones, each held against plain float64.

A reply is right, or the request is refused with an error that blames the caller. Anything else is a fault: a number
that differs, an exception, a refusal with another status. A fault names its situation:
``python -m tools.fuzz --situation 17 --seed 1`` draws that one again.
"""

import asyncio
import multiprocessing
import os
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tests.conftest import asker
from tests.plain_attention import as_replied, attend, has_formula, places

from attention_contract.base import ABSENT
from attention_contract.errors import AttentionError
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.modules import CreateModule
from attention_contract.spec import Sparsemax
from attention_contract.validation import validate
from attention_service.cost import Rates, Roofline
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device.torch_device import Device
from tools.fuzz.drawn_requests import Situation, bound_as_sent, drawn_request, drawn_situation, settled
from tools.fuzz.targets import PropertyError, refused

REQUESTS_OF_ONE: Final = 8
"""Requests of each situation. They are sent together, so that some run in one pass."""
REQUESTS = {operation.name: operation.request for operation in OPERATIONS}
EPSILON: Final = {"float64": 2e-15, "float32": 1.2e-7, "float16": 1e-3, "bfloat16": 8e-3}
LOOSE: Final = 0.6
"""Relative tolerance from which on a comparison says nothing."""
COUNTING_S: Final = 0.1
"""Seconds for an answer about costs, which leaves out what takes longer."""
MEMORY: Final = 2**30


@dataclass
class Outcome:
    """Counts of one share of the walk, and its faults as text."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def walk(requests: int, seed: int, workers: int | None = None) -> Outcome:
    """Send so many requests, in several processes. The same seed draws the same requests."""
    workers = workers or os.cpu_count() or 1
    situations = -(-requests // REQUESTS_OF_ONE)
    shares = [range(first, situations, workers * 8) for first in range(min(workers * 8, situations))]
    whole = Outcome()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for part in pool.map(partial(walk_situations, seed), shares):
            whole.counts += part.counts
            whole.faults += part.faults
    return whole


def walk_situations(seed: int, indices: range) -> Outcome:
    """Send the requests of these situations to an engine of their own."""
    torch.set_num_threads(1)
    return asyncio.run(_walk(seed, indices))


async def _walk(seed: int, indices: range) -> Outcome:
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        device = Device(torch.device("cpu"), "test", MEMORY, Roofline(Rates(1e10, 1e10, 1e-5)))
        engine = Engine(Path(folder), device, EngineSettings(memory_budget=MEMORY))
        await engine.start()
        try:
            for index in indices:
                await _situation(engine, f"{seed}:{index}", outcome)
        finally:
            engine.drain()
            await engine.stop()
    return outcome


async def _situation(engine: Engine, name: str, outcome: Outcome) -> None:
    try:
        situation = settled(drawn_situation(name))
        if situation.config is not None:
            made = {"name": "m", "config": situation.config, "parameters": situation.parameters, "durable": False}
            await engine.modules.create(validate(CreateModule, made))
    except AttentionError as error:
        refused(error)
        outcome.counts["refused"] += REQUESTS_OF_ONE
        return
    requests = [drawn_request(situation) for _ in range(REQUESTS_OF_ONE)]
    answers = await asyncio.gather(*(_answer(engine, situation, request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        kind, found = _judged(situation, request, *answer)
        outcome.counts[kind] += 1
        if kind in {"wrong", "unexpected"}:
            outcome.faults.append(f"situation {name}: {situation.operation} {request}\n{found}")
    if situation.config is not None:
        await engine.modules.delete("m")


async def _answer(engine: Engine, situation: Situation, request: dict[str, Any]) -> tuple[str, Any]:
    module = None if situation.config is None else "m"
    model = REQUESTS[situation.operation if module else f"raw_{situation.operation}"]
    try:
        bound = validate(model, request)
        deadline = time.monotonic() + COUNTING_S if situation.operation == "complexity" else None
        return "answered", await asker(engine, situation.operation)(module, bound, deadline=deadline)
    except AttentionError as error:
        if error.status == 507:
            return "refused", None
        try:
            refused(error)
        except PropertyError:
            return "unexpected", traceback.format_exc(limit=-3)
        return "refused", error.detail
    except Exception:
        return "unexpected", traceback.format_exc(limit=-4)


def _judged(situation: Situation, request: dict[str, Any], kind: str, found: Any) -> tuple[str, Any]:
    """Return the name of an answer's count, and what to say of a fault."""
    if kind != "answered":
        return kind, found
    try:
        return check(situation, request, found), None
    except Exception:
        return "wrong", traceback.format_exc(limit=-3)


# ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────────


def check(s: Situation, request: dict[str, Any], reply: Any) -> str:
    """Compare a reply with the formula. Returns the name of its count; raises AssertionError for a wrong one."""
    if s.operation in {"effects", "attribution", "complexity"} or not has_formula(s.spec):
        return "answered alone"
    bound = bound_as_sent(s, request)
    taps = attend(bound, _kept(s, request, reply))
    loose = _tolerance(s, request, taps)
    if loose > LOOSE or _vague_places(s, request):
        return "answered alone"
    names = request.get("return", ["weights"])
    if s.past and s.operation == "forward":
        names = [*names, "present_key", "present_value"]
    for tap in names:
        _close(getattr(reply, tap), as_replied(bound, tap, taps[tap].detach().numpy()), tap, loose)
    if s.operation == "weights":
        _check_top(bound, request, reply, taps, loose)
    if s.operation == "gradients":
        if isinstance(s.spec.normalizer, Sparsemax) and loose > 1e-4:
            return "answered alone"  # its gradient jumps where rounding moves a key over the threshold
        _check_gradients(s, request, bound, reply, taps, 4 * loose)
    return "right"


def _check_top(bound: Any, request: dict[str, Any], reply: Any, taps: dict[str, Any], loose: float) -> None:
    if not request["top_k"]:
        return
    plain = dict(request) | {"average_heads": False}
    weights = as_replied(_with_body(bound, plain), "weights", taps["weights"].detach().numpy())
    best = -np.sort(-weights, axis=-1)[..., : request["top_k"]]
    # No key is named where no further one has weight.
    _close(np.where(reply.top.keys < 0, 0, reply.top.weights), best, "top", loose)


def _with_body(bound: Any, body: dict[str, Any]) -> Any:
    return type(bound)(**(vars(bound) | {"body": body}))


def _check_gradients(
    s: Situation, request: dict[str, Any], bound: Any, reply: Any, taps: dict[str, Any], loose: float
) -> None:
    output = taps["output"]
    upstream = torch.ones_like(output)
    if "upstream" in request:
        upstream = torch.from_numpy(np.array(request["upstream"], np.float64)).reshape(output.shape)
    names = request["wrt"]
    of = [bound.tensors[name] if name in bound.tensors else taps[name] for name in names]
    loss = (output * upstream).sum()
    found = torch.autograd.grad(loss, of, allow_unused=True) if loss.requires_grad else [None] * len(of)
    for name, x, gradient in zip(names, of, found, strict=True):
        expected = (torch.zeros_like(x) if gradient is None else gradient).detach().numpy()
        if name not in bound.tensors:
            expected = as_replied(_with_body(bound, {}), name, expected)
        _close(reply.gradients[name], expected, f"gradient of {name}", loose)


def _tolerance(s: Situation, request: dict[str, Any], taps: dict[str, Any]) -> float:
    """Relative rounding: that of the dtype, times the sizes that cancel in a score."""
    normalizer = getattr(s.spec.normalizer, "dtype", "float32")
    eps = max(EPSILON[s.dtype], EPSILON[normalizer] if normalizer in {"float16", "bfloat16"} else 0.0)
    largest = 1.0
    for tap in ("scores", "masked_scores", "q", "k", "v"):
        if tap in taps and taps[tap].numel():
            largest = max(largest, float(taps[tap].detach().abs().nan_to_num(0, 0, 0).max()))
    return 8 * eps * (2 + largest / getattr(s.spec.normalizer, "temperature", 1.0))


def _vague_places(s: Situation, request: dict[str, Any]) -> bool:
    """True for places so far away that an angle in float64 has no digits left."""
    if s.spec.position.name not in {"rope", "sinusoidal"}:
        return False
    at_queries, at_keys = places(bound_as_sent(s, request), s.batch, s.queries, s.new_keys)
    return max((abs(each) for rows in (at_queries, at_keys) for row in rows for each in row), default=0) > 2**32


def _kept(s: Situation, request: dict[str, Any], reply: Any) -> np.ndarray | None:
    """The weights that dropout kept, of all heads and queries; None if there is none."""
    if "dropout" not in request:
        return None
    kept = reply.dropout_mask if s.batched else reply.dropout_mask[None]
    return kept[:, None] if s.layout == "headless" else kept


def _close(actual: Any, expected: np.ndarray, what: str, loose: float) -> None:
    assert actual is not None, f"{what} is missing"
    assert actual is not ABSENT, f"{what} is missing"
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    scale = max(1.0, float(np.abs(expected[finite]).max(initial=0.0)))
    same = np.where(finite, np.abs(actual - np.where(finite, expected, 0.0)) <= loose * scale, actual == expected)
    assert same.all(), f"{what}: got {actual.tolist()}, expected {expected.tolist()} within {loose * scale:.2g}"
