"""Bytes of the tensors that come in, stay and go out."""

from functools import lru_cache
from math import prod

from attention_contract.spec import Linear
from attention_service.core.multihead import learned_of, parameter_shapes
from attention_service.cost.workload import Workload


@lru_cache(maxsize=1024)
def parameter_count(work: Workload) -> int:
    """Parameters, biases and what the spec learns included: about 4·d_model² where all widths are d_model.

    Raw attention has those alone that its spec learns.
    """
    if work.sizes is not None:
        return sum(prod(shape) for shape in parameter_shapes(work.sizes).values())
    return sum(prod(learned.shape) for learned in learned_of(work.spec, work.widths).values())


def kv_cache_bytes_per_token(work: Workload) -> int:
    """Keys and values of one token of one sequence: Hkv · (D + V) elements. Source: Shazeer 2019, section 3."""
    return work.kv_heads * (work.key_dim + work.value_dim) * work.itemsize


def kv_cache_bytes(work: Workload) -> int:
    """Keys and values of all tokens of the batch, past and new."""
    return work.batch * work.sequence_keys * kv_cache_bytes_per_token(work)


@lru_cache(maxsize=1024)
def input_bytes(work: Workload) -> int:
    """The request's tensors in the dtype that is computed in, with what the spec of raw attention learns."""
    wide = max(work.itemsize, 4)
    shapes = token_shapes(work) | carried_shapes(work)
    sent = sum(prod(shape) * (wide if name.startswith("initial") else work.itemsize) for name, shape in shapes.items())
    learned = parameter_count(work) if work.sizes is None else 0
    mask = work.request_mask_elements * (1 if work.bool_mask else work.itemsize)
    return sent + mask + (learned + work.edit_elements) * work.itemsize


def token_shapes(work: Workload) -> dict[str, tuple[int, ...]]:
    """Shapes of queries, keys and values, past ones included."""
    sizes, lead = work.sizes, (work.batch, work.kv_heads)
    widths = (work.head_dim, work.key_dim, work.value_dim) if sizes is None else sizes.inputs
    heads = (work.heads, work.kv_heads, work.kv_heads)
    tokens = (work.queries if "key" in work.inputs else work.new_keys, work.new_keys, work.new_keys)
    shapes: dict[str, tuple[int, ...]] = {
        name: (work.batch, length, width) if sizes is not None else (work.batch, each, length, width)
        for name, each, length, width in zip(("query", "key", "value"), heads, tokens, widths, strict=True)
        if name in work.inputs
    }
    past = {"past_key": (*lead, work.past, work.key_dim), "past_value": (*lead, work.past, work.value_dim)}
    return shapes | past if work.past else shapes


def carried_shapes(work: Workload) -> dict[str, tuple[int, ...]]:
    """Shapes of what a running state is sent."""
    lead = work.batch, work.kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "gate": (*lead, work.new_keys, work.head_dim if work.fine_gate else 1),
        "beta": (*lead, work.new_keys, 1),
        "initial_state": (*lead, work.head_dim, work.value_dim),
        "initial_normalizer": (*lead, work.head_dim),
    }
    return {name: shape for name, shape in shapes.items() if name in work.sent}


def projections(work: Workload) -> tuple[int, int]:
    """FLOPs of the projections of queries, keys and values, and of the output projection."""
    s = work.sizes
    if s is None:
        return 0, 0
    queries = work.batch * work.queries
    keys = work.batch * work.new_keys
    into = queries * s.d_model * s.heads * s.head_dim
    into += keys * s.kv_heads * (s.key_width * s.head_dim + s.value_width * s.value_dim)
    into *= 2 if work.apart else 1  # projections apart
    return 2 * into, 2 * queries * s.heads * s.value_dim * s.d_model


def output_bytes(work: Workload) -> int:
    """The reply's tensors in the dtype that is computed in: the taps, all keys and values with a past, and the state.

    A state that is returned is ``[B, Hkv, D, Dv]``, with its normalizer ``[B, Hkv, D]`` where the method divides.
    """
    present = kv_cache_bytes(work) if work.past else 0
    elements = sum(tap_elements(work, tap) for tap in work.taps)
    method = work.spec.method
    if "return_state" in work.sent and isinstance(method, Linear):
        elements += work.batch * work.kv_heads * work.head_dim * (work.value_dim + method.normalized)
    return present + elements * work.itemsize


def tap_elements(work: Workload, tap: str) -> int:
    """Elements of one tap, of the selected heads and queries."""
    heads = work.heads if work.selected_heads is None else work.selected_heads
    kv_heads = work.kv_heads if work.selected_heads is None else work.selected_heads
    queries = work.queries if work.selected_queries is None else work.selected_queries
    if tap == "output":
        width = work.heads * work.value_dim if work.sizes is None else work.sizes.d_model
        return work.batch * work.queries * width
    elements = {
        "q": heads * queries * work.head_dim,
        "k": kv_heads * work.keys * work.key_dim,
        "v": kv_heads * work.keys * work.value_dim,
        "context": heads * queries * work.value_dim,
        "lse": heads * queries,
    }
    return work.batch * elements.get(tap, heads * queries * work.keys)
