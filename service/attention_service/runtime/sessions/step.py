"""The parts of a session's requests: checks, the run over its past, and the tokens that its policy keeps."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest, LengthMismatch
from attention_contract.schemas.attention import ApproximationError, AttentionInputs, Ran, Select
from attention_contract.schemas.sessions import StepReply, StepRequest
from attention_contract.tensors import Array
from attention_service.core.kv_cache.block_table import BlockTable
from attention_service.core.kv_cache.past import Cached, gathered
from attention_service.core.kv_cache.runs import cut
from attention_service.core.positions import POSITIONS
from attention_service.core.positions.frequencies import outgrown_length
from attention_service.core.tensors import TORCH_DTYPES, to_device, to_numpy, to_torch
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import wrong_shape
from attention_service.runtime.scheduling.jobs import Job, JobEnd
from attention_service.runtime.scheduling.operation import Fields
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.sessions import step_operation
from attention_service.runtime.sessions.decode_session import DecodeSession

CUT_PAIRS = 2**25
"""Pairs of a new token and a key from which on a step over a past is cut: its mask alone would take 32 MiB."""
LEAST_PART = 64
"""The fewest tokens of a part."""
_COPIED_AT_ONCE = 1024
"""Tokens of a given past that are copied to the device at a time: what is on its way is in no budget."""


def check_at(length: int, at: int | None) -> None:
    """Raise LengthMismatch unless the session has the length that the caller believes."""
    if at is not None and at != length:
        raise LengthMismatch.at(
            "at",
            f"the session has {length} tokens, not {at}; continue from its length, or truncate it",
            expected=at,
            actual=length,
        )


def new_tokens(session: DecodeSession, request: AttentionInputs) -> int:
    """Return the number of new tokens. Raises ShapeMismatch unless query and key have one part for each sequence."""
    query, sequences = request.query, len(session.tables)
    batch = query.shape[0] if query.ndim == 3 else 1
    if query.ndim not in {2, 3} or batch != sequences:
        one = " or [Lq, d_model]" if sequences == 1 else ""
        words = f"[{sequences}, Lq, d_model]{one} for the session's {sequences} sequences"
        raise wrong_shape("query", words, query, sequences)
    key = query if request.key is None else request.key
    if key.ndim != query.ndim or key.shape[:-2] != query.shape[:-2]:
        expected = [*query.shape[:-2], "tokens", "width"]
        raise wrong_shape("key", f"{expected}, as query has", key, expected)
    return int(key.shape[-2])


def check_capacity(capacity: int | None, held: int, more: int, param: str) -> None:
    """Raise InvalidRequest, for the field ``param``, where a session of this capacity cannot hold more tokens."""
    if capacity is not None and held + more > capacity:
        raise InvalidRequest.at(
            param,
            f"a session of capacity {capacity} that holds {held} tokens cannot take {more} more. Open a "
            "session of more capacity from this one",
            limit=capacity,
        )


async def run_over_past(
    runner: RequestRunner,
    session: DecodeSession,
    prepare: Callable[..., Job],
    request: AttentionInputs,
    deadline: float | None,
    rows: Sequence[Cached],
) -> tuple[Fields, Ran]:
    """Run an operation over new tokens and the past of ``rows``. Raises what the operation raises."""
    reads = POSITIONS.of(session.module.config.spec.position).reads
    if reads and session.keeper is not None and rows[0].tokens != session.length and request.positions is None:
        tokens = np.arange(session.length, session.length + request.query.shape[-2])
        request = request.model_copy(update={"positions": np.broadcast_to(tokens, (len(rows), len(tokens)))})
    job = await runner.planned(partial(prepare, rows=tuple(rows)), session.module, request)
    session.running = job.ending = JobEnd()
    return await runner.executor.run(job, deadline)


async def _run_planned(
    runner: RequestRunner,
    session: DecodeSession,
    request: StepRequest,
    deadline: float | None,
    rows: Sequence[Cached],
) -> tuple[Fields, Ran]:
    """Run a step by the plan that is remembered, or by one that is made now. Raises what the operation raises."""
    job = None
    if session.keeper is None:
        job = step_operation.planned(session.module, request, runner.device, runner.budget.capacity, tuple(rows))
    if job is None:
        return await run_over_past(runner, session, step_operation.prepare, request, deadline, rows)
    session.running = job.ending = JobEnd()
    return await runner.executor.run(job, deadline)


async def step(
    runner: RequestRunner, session: DecodeSession, request: StepRequest, new: int, deadline: float | None
) -> StepReply:
    """Compute a step and append its tokens; a step that fails appends nothing."""
    rows, held = writable(session.tables, new), session.held
    long = session.keeper is None and held and new * (held + new) > CUT_PAIRS
    if long and step_operation.is_cuttable(session.module, request):
        fields, ran = await _in_parts(runner, session, request, new, deadline, rows)
    else:
        fields, ran = await _run_planned(runner, session, request, deadline, rows)
    kept: Tensor | None = None
    whole: Sequence[Cached] = ()
    if session.whole is not None:
        whole = writable(session.whole, new)
        fields["error"] = await _error(runner, session, request, deadline, whole, fields)
    if session.keeper is not None:
        seen = await _weights(runner, session, request, new, deadline, rows)
        kept = session.keeper.after_step(seen, held, new)
    for tables, rows_of_tables in ((session.tables, rows), (session.whole or (), whole)):
        for table, row in zip(tables, rows_of_tables, strict=True):
            table.append(row.new)
    session.length += new
    if kept is not None:
        keep(session.tables, kept)
        for table in session.tables:
            table.reserve((session.capacity or 0) - table.tokens)
    fields["warning"] = _warning(session, session.length - new)
    return valid(StepReply, fields | {"ran": ran, "session": session.id, "length": session.length})


def _warning(session: DecodeSession, began: int) -> str | None:
    """The warning of a step after which earlier keys have other angles than its own; None without any."""
    length = outgrown_length(session.module.config.spec.position)
    if length is None or not began or session.length <= length:
        return None
    return (
        f"the session has outgrown the original length of {length} tokens: keys that came before this step keep the "
        f"angles of the length at which they came, so that a pass without a cache differs"
    )


async def _in_parts(
    runner: RequestRunner,
    session: DecodeSession,
    request: StepRequest,
    new: int,
    deadline: float | None,
    rows: Sequence[Cached],
) -> tuple[Fields, Ran]:
    """Compute a long step over a past part by part: other requests run between the parts."""
    at_once = max(CUT_PAIRS // (session.held + new), LEAST_PART)
    outputs, runs = [], []
    for start in range(0, new, at_once):
        stop = min(start + at_once, new)
        part = request.model_copy(update={"query": request.query[..., start:stop, :]})
        cut = [row.part(start, stop) for row in rows]
        fields, ran = await run_over_past(runner, session, step_operation.prepare, part, deadline, cut)
        outputs.append(fields)
        runs.append(ran)
    summed = ("flops", "predicted_ms", "predicted_low_ms", "predicted_high_ms", "compute_ms", "cpu_ms", "queue_ms")
    total: dict[str, Any] = {name: sum(getattr(ran, name) for ran in runs) for name in summed}
    total["peak_bytes"] = max(ran.peak_bytes for ran in runs)
    whole = np.concatenate([fields["output"] for fields in outputs], axis=-2)
    return {"output": whole}, runs[0].model_copy(update=total)


def writable(tables: Sequence[BlockTable], new: int) -> list[Cached]:
    """The past of each sequence, and slots for its new tokens."""
    caches = []
    for table in tables:
        spans = table.writable(new)  # may move the last page
        caches.append(Cached(table.spans, spans))
    return caches


def readable(tables: Sequence[BlockTable]) -> list[Cached]:
    """The past of each sequence."""
    return [Cached(table.spans, ()) for table in tables]


async def _error(
    runner: RequestRunner,
    session: DecodeSession,
    request: StepRequest,
    deadline: float | None,
    whole: Sequence[Cached],
    fields: Fields,
) -> ApproximationError | None:
    """The difference of a step's output from that over the whole past; None if the step returns no output."""
    exact, _ = await run_over_past(runner, session, step_operation.prepare, request, deadline, whole)
    if "output" not in fields:
        return None
    difference = (to_torch(fields["output"]) - to_torch(exact["output"])).double()
    if not difference.numel():
        return ApproximationError(max=0.0, rms=0.0)
    return ApproximationError(max=float(difference.abs().max()), rms=float(difference.square().mean().sqrt()))


async def _weights(
    runner: RequestRunner,
    session: DecodeSession,
    request: StepRequest,
    new: int,
    deadline: float | None,
    rows: Sequence[Cached],
) -> Tensor | None:
    """The weights ``[B, H, chosen queries, held + new]`` that the policy needs; None if it needs none."""
    queries = request.query.shape[-2]
    wanted = None if session.keeper is None else session.keeper.wants(queries, session.held)
    if wanted is None:
        return None
    changes: dict[str, Any] = {
        "return_": ["weights"], "select": Select(queries=list(range(queries)[wanted])), "average_heads": False,
        "kernel": None, "report_error": False, "dropout": None, "compare": None,
    }  # fmt: skip
    changed = request.model_copy(update=changes)
    fields, _ = await run_over_past(runner, session, step_operation.prepare, changed, deadline, rows)
    weights = to_torch(fields["weights"])
    return weights if request.query.ndim == 3 else weights[None]


def keep(tables: Sequence[BlockTable], kept: Tensor) -> None:
    """Keep these tokens of each sequence and head, broadcastable to ``[B, Hkv, kept]`` and ascending."""
    alike = bool((kept == kept[:, :1]).all())
    for table, chosen in zip(tables, kept.expand(len(tables), -1, -1), strict=True):
        if alike:
            _keep_alike(table, chosen[0].tolist())
            continue
        past = Cached(table.spans, ()).gathered()
        if past is None:
            continue
        keys, values = (x.gather(1, chosen[..., None].to(x.device).expand(-1, -1, x.shape[-1])) for x in past)
        table.truncate(0)
        spans = table.writable(chosen.shape[-1])
        Cached((), spans).write(keys, values)
        table.append(spans)


def _keep_alike(table: BlockTable, chosen: Sequence[int]) -> None:
    """Forget the tokens that are not chosen, the last first, without moving the others."""
    stop = table.tokens
    for token in [*reversed(chosen), -1]:
        if token + 1 < stop:
            table.drop(token + 1, stop)
        stop = token


def past_of(session: DecodeSession) -> dict[str, Array]:
    """Copy the keys ``[B, Hkv, P, D]`` and values ``[B, Hkv, P, Dv]`` that a session holds."""
    shapes = step_operation.past_arrays(session.module, len(session.tables), session.held)
    rows, module = readable(session.tables), session.module
    dtype = module.parameters["q_proj.weight"].dtype
    past = gathered(rows, shapes["past_key"].shape, shapes["past_value"].shape, module.device, dtype)
    return {name: to_numpy(x.clone()) for name, x in past.items()}


def bind_past(module: Module, sequences: int | None, key: Array, value: Array) -> tuple[Tensor, Tensor]:
    """The keys ``[B, Hkv, P, D]`` and values of a past that a request brings, on the host and as they came.

    Raises ShapeMismatch unless they fit the module and the number of sequences.
    """
    sizes = module.sizes
    pasts: list[Array] = []
    for name, array, width in (("past_key", key, sizes.head_dim), ("past_value", value, sizes.value_dim)):
        full = array[None] if array.ndim == 3 else array
        expected = f"[{sequences or 'B'}, {sizes.kv_heads}, P, {width}]"
        fits = full.ndim == 4 and full.shape[1] == sizes.kv_heads and full.shape[3] == width and full.shape[0] > 0
        if not fits or sequences not in {None, full.shape[0]}:
            raise wrong_shape(name, f"{expected} ([B, Hkv, P, width])", array, expected)
        if pasts and pasts[0].shape[:3] != full.shape[:3]:
            alike = list(pasts[0].shape[:3])
            raise wrong_shape(name, f"as many sequences and tokens as past_key has, {alike}", array, alike)
        pasts.append(full)
    keys, values = map(to_torch, pasts)
    return keys, values


def begin_with(session: DecodeSession, keys: Tensor, values: Tensor) -> None:
    """Let an empty session hold a past of the host, for which it has pages. Wait until all of it is there."""
    device, dtype = session.module.device, TORCH_DTYPES[session.module.config.dtype or "float32"]
    for tables in (session.tables, session.whole or ()):
        for table, *past in zip(tables, keys, values, strict=False):
            spans = table.writable(keys.shape[2])
            start = 0
            for part in cut(spans, _COPIED_AT_ONCE):
                stop = start + part.tokens
                Cached((), (part,)).write(*(to_device(x[:, start:stop], device, dtype) for x in past))
                start = stop
            table.append(spans)
    if device.type == "cuda":  # the next step may run on another stream
        torch.cuda.current_stream(device).synchronize()
    session.length = keys.shape[2]
