"""Answers of finite numbers: a question whose numbers overflow, or become NaN, gets an error that names the layer.

Each reply is looked over once. Only one with such numbers has a second look: the question is answered again while the
outputs of the modules are watched. A request that brings NaN or ∞ itself is answered with what comes of them.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import orjson

from attention_contract.base import WireModel
from attention_contract.errors import AttentionError, NotFinite
from attention_contract.tensors import decode
from attention_service.core.inspection.statistics import OF_SOME, PAIR_STATISTICS, RECEIVED
from attention_service.core.tensors import torch_dtype_name
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.nonfinite_outputs import first_nonfinite
from attention_service.models.process.served import Answer, PricedRun
from attention_service.models.process.work_blocks import within_blocks

_FORBIDS: Final = frozenset({"index_scores", "logits", "logprob", "lse", "masked_scores", "targets"})
"""Fields in which −∞ says that a token or a key is forbidden."""
_UNKNOWN: Final = PAIR_STATISTICS | OF_SOME.keys() | {RECEIVED, "effects", "relative_gap"}
"""Fields in which NaN says that there is no such number. Those that are measured as effects are looked at before."""
_OTHERS: Final = frozenset({"labels", "ran", "usage"})
"""Fields that hold no numbers of the model."""
_OF_SHARES: Final = _OTHERS | {"statistics"}
"""The same, of a request with edits: a head whose weights are all set to 0 has no shares, and NaN says so."""
_NUMBERS: Final = frozenset({float, int})
_SPECIAL: Final = frozenset({"NaN", "Infinity", "-Infinity"})


def finite_work(work: PricedRun, loaded: LoadedModel, made: Callable[[], PricedRun], body: memoryview) -> PricedRun:
    """Return the work of a request, whose answer has finite numbers or is an error. ``made`` makes the work anew."""

    def check(answer: Answer) -> None:
        if answer.reply is not None:
            check_finite(answer.reply, body)

    return within_blocks(work, partial(_naming, loaded, made), check)


@contextmanager
def _naming(loaded: LoadedModel, made: Callable[[], PricedRun]) -> Iterator[None]:
    """Name the layer in the error of a block whose numbers are not finite."""
    try:
        yield
    except NotFinite as fault:
        raise (fault if "dtype" in fault.facts else located(fault, loaded, lambda: end_of(made()))) from None


def end_of(answer: Any) -> Any:
    """Return the last result of a work, once all its parts ran."""
    while isinstance(answer, PricedRun | Generator):
        if isinstance(answer, PricedRun):
            answer = answer.run()
            continue
        try:
            while True:
                next(answer)
        except StopIteration as end:
            answer = end.value
    return answer


def check_finite(reply: WireModel, body: memoryview | None = None) -> None:
    """Raise NotFinite for a reply with NaN or ∞, unless these have a meaning in their field, or its request has some.

    ``body``: the request.
    """
    field = _nonfinite_field(reply)
    if field is not None and body is not None:
        request = orjson.loads(body)
        if _has_nonfinite(request):
            return
        if _is_edited(request):
            field = _nonfinite_field(reply, _OF_SHARES)
    if field is not None:
        raise NotFinite(f"{field} of the reply is not finite", param="model", field=field)


def located(fault: NotFinite, loaded: LoadedModel, again: Callable[[], Any]) -> NotFinite:
    """Return the same fault with the layer whose numbers are the first that are not finite, once all ran again."""
    dtype = torch_dtype_name(loaded.model.dtype)
    module = first_nonfinite(loaded.model, again)
    advice = "; load the model with dtype bfloat16 or float32" if dtype == "float16" else ""
    facts = fault.facts | {"dtype": dtype}
    if module is None:
        return NotFinite(f"{fault.detail} in {dtype}{advice}", param=fault.param, **facts)
    name = next(name for name, named in loaded.model.named_modules() if named is module)
    layers = [place.key for place in loaded.all_places if any(part is module for part in place.layer.modules())]
    facts["module"] = name
    if layers:
        facts["layer"] = layers[0]
    where = f"layer {layers[0]} ({name})" if layers else name
    return NotFinite(f"{fault.detail}: {where} makes NaN or ∞ in {dtype}{advice}", param=fault.param, **facts)


# ── the look at a reply ──────────────────────────────────────────────────────────────────────────────────────────────


def _nonfinite_field(reply: WireModel, others: frozenset[str] = _OTHERS) -> str | None:
    """The dotted name of the first field with a number that is not finite and has no meaning; None without one.

    ``others``: the names of fields that are not looked at.
    Every reply is looked through, so it is one loop without a call a field.
    """
    left: list[tuple[tuple[str, ...], Any]] = [((), reply)]
    while left:
        path, value = left.pop()
        if value is None:  # as most fields of a layer are
            continue
        if isinstance(value, float):
            if not (math.isfinite(value) or _is_meant(value, path)):
                return ".".join(path)
            continue
        if isinstance(value, list | tuple):
            if not value or isinstance(value[0], str):
                continue
            if not all(map(_NUMBERS.__contains__, map(type, value))):
                left += [((*path, str(at)), value[at]) for at in range(len(value) - 1, -1, -1)]
                continue
            value = np.asarray(value, np.float64)
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biuOSU" and not np.isfinite(value).all() and not _is_meant(value, path):
                return ".".join(path)
        elif isinstance(value, WireModel):
            fields = type(value).model_fields
            left += [((*path, name), getattr(value, name)) for name in reversed(fields) if name not in others]
        elif isinstance(value, Mapping):
            left += [((*path, str(name)), member) for name, member in reversed([*value.items()])]
    return None


def _is_meant(value: Any, path: tuple[str, ...]) -> bool:
    """True if numbers that are not finite have a meaning in a field."""
    numbers = np.asarray(value)
    if _UNKNOWN.intersection(path):
        return True
    return bool(_FORBIDS.intersection(path)) and not bool((np.isnan(numbers) | np.isposinf(numbers)).any())


def _is_edited(request: Any) -> bool:
    """True for a request with edits of a layer, its own or those of a generation."""
    attention = request.get("attention")
    return bool(request.get("edits") or (isinstance(attention, dict) and attention.get("edits")))


def _has_nonfinite(value: Any) -> bool:
    if isinstance(value, str):
        return value in _SPECIAL
    if isinstance(value, list):
        return any(map(_has_nonfinite, value))
    if isinstance(value, dict):
        if {"dtype", "shape"} <= value.keys():
            try:
                return not bool(np.isfinite(decode(value)).all())
            except (AttentionError, ValueError, TypeError):
                return False
        return any(map(_has_nonfinite, value.values()))
    return isinstance(value, float) and not math.isfinite(value)
