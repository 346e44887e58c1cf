"""Bytes of the tensors that come in, stay and go out."""

from collections.abc import Collection
from math import prod

from attention_contract.spec import Linear
from attention_service.core.multihead import learned_of, parameter_shapes
from attention_service.cost.attention import SizedAttention

_TOKEN_TENSORS = ("query", "key", "value", "past_key", "past_value", "gate", "beta")
"""Tensors with numbers for each token, in the dtype of the computation."""
_RUNNING_STATES = ("initial_state", "initial_normalizer")
"""The beginning of a running state, in float32 or wider."""


def parameter_count(x: SizedAttention) -> int:
    """Parameters, biases and what the spec learns included: about 4·d_model² where all widths are d_model.

    Raw attention has those alone that its spec learns.
    """
    if x.sizes is not None:
        return sum(prod(shape) for shape in parameter_shapes(x.sizes).values())
    return sum(prod(learned.shape) for learned in learned_of(x.spec, x.widths).values())


def kv_cache_bytes_per_token(x: SizedAttention) -> int:
    """Keys and values of one token of one sequence: Hkv · (D + V) elements. Source: Shazeer 2019, section 3."""
    return x.kv_heads * (x.key_dim + x.value_dim) * x.itemsize


def kv_cache_bytes(x: SizedAttention) -> int:
    """Keys and values of all tokens of the batch, past and new."""
    return x.batch * x.sequence_keys * kv_cache_bytes_per_token(x)


def input_bytes(x: SizedAttention) -> int:
    """The request's tensors in the dtype that is computed in, with what the spec of raw attention learns."""
    itemsize = dict.fromkeys(_TOKEN_TENSORS, x.itemsize) | dict.fromkeys(_RUNNING_STATES, max(x.itemsize, 4))
    sent = sum(array.size * itemsize.get(name, 0) for name, array in x.arrays.items())
    learned = parameter_count(x) if x.sizes is None else 0
    mask = prod(x.mask_shape) * (1 if x.bool_mask else x.itemsize) if x.mask_shape else 0
    return sent + mask + learned * x.itemsize


def projections(x: SizedAttention) -> tuple[int, int]:
    """FLOPs of the projections of queries, keys and values, and of the output projection."""
    s = x.sizes
    if s is None:
        return 0, 0
    queries = x.batch * x.queries
    keys = x.batch * x.new_keys
    into = queries * s.d_model * s.heads * s.head_dim
    into += keys * s.kv_heads * (s.key_width * s.head_dim + s.value_width * s.value_dim)
    into *= 2 if x.apart else 1  # projections apart
    return 2 * into, 2 * queries * s.heads * s.value_dim * s.d_model


def output_bytes(x: SizedAttention, taps: Collection[str]) -> int:
    """The reply's tensors in the dtype that is computed in: the taps, all keys and values with a past, and the state.

    A state that is returned is ``[B, Hkv, D, Dv]``, with its normalizer ``[B, Hkv, D]`` where the method divides.
    """
    present = kv_cache_bytes(x) if x.past else 0
    elements = sum(tap_elements(x, tap) for tap in taps)
    method = x.spec.method
    if "return_state" in x.sent and isinstance(method, Linear):
        elements += x.batch * x.kv_heads * x.head_dim * (x.value_dim + method.normalized)
    return present + elements * x.itemsize


def tap_elements(x: SizedAttention, tap: str) -> int:
    """Elements of one tap."""
    if tap == "output":
        return x.batch * x.queries * (x.heads * x.value_dim if x.d_model is None else x.d_model)
    elements = {
        "q": x.heads * x.queries * x.head_dim,
        "k": x.kv_heads * x.keys * x.key_dim,
        "v": x.kv_heads * x.keys * x.value_dim,
        "context": x.heads * x.queries * x.value_dim,
        "lse": x.heads * x.queries,
    }
    return x.batch * elements.get(tap, x.heads * x.queries * x.keys)
