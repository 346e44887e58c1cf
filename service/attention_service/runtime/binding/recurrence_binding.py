"""Checks of a request against its method: the tensors that the method reads, and the requests that it cannot answer.

Checks allocate nothing.
"""

from collections.abc import Sequence

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import AttentionInputs
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.spec import AttentionSpec, Linear, Linformer
from attention_contract.tensors import Array
from attention_service.core.masks.global_projections import has_separate
from attention_service.core.methods import METHODS, approximation_of
from attention_service.core.methods.linear import Linear as LinearMethod
from attention_service.runtime.binding.bound_request import wrong_shape

NAMES = ("gate", "beta", "initial_state", "initial_normalizer")
"""The request's tensors of a running state."""
_NOTHING: frozenset[str] = frozenset()


def check_request(spec: AttentionSpec, request: AttentionInputs, *, module: bool, keys: int) -> None:
    """Raise InvalidRequest, naming the field, where the spec's method cannot do what the request asks.

    keys: how many there are, the past included.
    """
    if request.past_key is not None and request.past_key.shape[-2]:
        check_past(spec, "past_key")
    method = spec.method
    reads = _reads(spec, module=module)
    for name in NAMES:
        if getattr(request, name) is not None and name not in reads:
            raise InvalidRequest.at(name, f"{_unread(spec, name, module=module)}")
    for name in ("return_state", "report_error"):
        if getattr(request, name, False):
            _check_answerable(name, spec, request)
    if approximation_of(spec) is None:
        return
    called = f"method {method.name}"
    if request.mask is not None:
        raise InvalidRequest.at(
            "mask",
            f"{called} does not compute pairs, so it takes no mask of pairs; send key_mask or key_lengths for "
            "padding, or take method exact",
        )
    if getattr(request, "dropout", None) is not None:
        raise InvalidRequest.at("dropout", f"{called} has no weights to drop; leave it out, or take method exact")
    offsets = request.offsets
    if offsets is not None and spec.masks and offsets.size and offsets.min() != offsets.max():
        raise InvalidRequest.at(
            "offsets",
            f"{called} needs the same offset for all sequences, and these differ; send one number, or take method "
            "exact",
        )
    check_keys(spec, keys, "query" if request.key is None else "key")
    if isinstance(method, Linear):
        _check_linear(method, request, reads, module=module)


def check_past(spec: AttentionSpec, param: str) -> None:
    """Raise InvalidRequest, for the field ``param``, where keys and values of earlier tokens continue nothing."""
    if has_separate(spec.masks):
        raise InvalidRequest.at(
            param,
            "global tokens have separate projections, and a past holds only one; send the whole sequence, without "
            "a past",
        )
    if isinstance(spec.method, Linear) and spec.method.rule != "sum":
        raise InvalidRequest.at(
            param,
            f"rule {spec.method.rule} would need the gate or beta of each earlier token; leave it out, and "
            "send the final_state of an earlier reply as initial_state",
        )


def check_keys(spec: AttentionSpec, keys: int, param: str) -> None:
    """Raise InvalidRequest, for the field ``param``, for more keys, the past included, than the method takes."""
    method = spec.method
    if isinstance(method, Linformer) and keys > method.length:
        raise InvalidRequest.at(
            param,
            f"{keys} keys, the past included, are more than the method's length, {method.length}; send fewer",
            limit=method.length,
        )


def bind_tensors(
    request: AttentionInputs, *, batch: int, kv_heads: int, keys: int, head_dim: int, value_dim: int, lead: int
) -> dict[str, Array]:
    """The request's tensors of a running state, batched and by head. Raises ShapeMismatch or InvalidRequest.

    keys: how many come with this request; lead: how many of the dimensions B and Hkv the layout has, 2, 1 or 0.
    """
    bound = {}
    shapes: dict[str, Sequence[tuple[int, ...]]] = {
        "gate": [(keys,), (keys, head_dim)],
        "beta": [(keys,)],
        "initial_state": [(head_dim, value_dim)],
        "initial_normalizer": [(head_dim,)],
    }
    for name, fits in shapes.items():
        array = getattr(request, name)
        if array is None:
            continue
        leading = (batch, kv_heads)[2 - lead :]
        if array.shape not in {(*leading, *shape) for shape in fits}:
            expected = " or ".join(str([*leading, *shape]) for shape in fits)
            raise wrong_shape(name, expected, array)
        bound[name] = array.reshape(batch, kv_heads, *array.shape[lead:])
    gate = bound.get("gate")
    if gate is not None and gate.size and not (gate.min() > 0 and gate.max() <= 1):
        raise InvalidRequest.at("gate", f"expected numbers above 0 and up to 1, got {gate.min()} to {gate.max()}")
    return bound


def _reads(spec: AttentionSpec, *, module: bool) -> frozenset[str]:
    """The request's tensors that the method reads."""
    method = METHODS.of(spec.method)
    return method.carried(module=module) - {"return_state"} if isinstance(method, LinearMethod) else _NOTHING


def _unread(spec: AttentionSpec, name: str, *, module: bool) -> str:
    if not isinstance(spec.method, Linear):
        return f"method {spec.method.name} has no running state; leave it out, or take method linear"
    if name == "initial_normalizer":
        return "this method divides by nothing (normalize); leave it out"
    if module and _learns(spec, name):
        return f"the module makes its own from the keys' tokens (method.{name}.weight); leave it out"
    rules = "gated or gated_delta" if name == "gate" else "delta or gated_delta"
    return f"rule {spec.method.rule} reads none; leave it out, or take rule {rules}"


def _learns(spec: AttentionSpec, name: str) -> bool:
    method = METHODS.of(spec.method)
    return isinstance(method, LinearMethod) and (method.gated if name == "gate" else method.delta)


def _check_answerable(name: str, spec: AttentionSpec, request: AttentionInputs) -> None:
    if isinstance(request, GradientsRequest):
        raise InvalidRequest.at(name, "it belongs to a forward request; send it there")
    if name == "return_state" and not isinstance(spec.method, Linear):
        raise InvalidRequest(
            f"return_state: method {spec.method.name} has no running state; leave it out, or take method linear",
            param=name,
        )
    if name == "report_error" and approximation_of(spec) is None:
        raise InvalidRequest(
            "report_error: method exact has no error; leave it out, or take a method that approximates", param=name
        )
    for field, sent in (("initial_state", request.initial_state is not None), ("edits", getattr(request, "edits", ()))):
        if name == "report_error" and sent:
            raise InvalidRequest(
                f"report_error: exact attention is compared over the same inputs, without {field}; leave one of them "
                "out",
                param=name,
            )


def _check_linear(method: Linear, request: AttentionInputs, reads: frozenset[str], *, module: bool) -> None:
    for name in ("gate", "beta"):
        if name in reads and getattr(request, name) is None:
            raise InvalidRequest.at(name, f"rule {method.rule} needs it; send [B, Hkv, Lk]")
    if method.normalized and (request.initial_state is None) != (request.initial_normalizer is None):
        missing = "initial_state" if request.initial_state is None else "initial_normalizer"
        raise InvalidRequest.at(
            missing, "a method that normalizes needs initial_state and initial_normalizer together; send both or none"
        )
