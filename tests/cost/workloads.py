"""Blank requests of a few MiB, raw and of modules, exact and of every method that approximates; and what they cost."""

import numpy as np
import torch

from attention_contract import spec
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import DTYPES
from attention_service.core.masks.visibility import EVERYTHING
from attention_service.core.multihead import Sizes
from attention_service.core.problem import Selection, WeightDropout, Widths
from attention_service.core.tensors import to_numpy, torch_dtype_name
from attention_service.cost import Seen
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations.differentiation import INPUTS, TAPS, Targets
from attention_service.runtime.operations.forward import PLAIN, Forward
from attention_service.runtime.operations.gradients import Gradients
from attention_service.runtime.planning.blank_requests import at_sizes, new_request, sizes_of, unsent
from attention_service.runtime.planning.rehearsals import seen
from attention_service.runtime.planning.request_sizes import RequestSizes

BIASES = Biases(q_proj=True, k_proj=True, v_proj=True, o_proj=True)
CAUSAL = [spec.Causal()]
OUTPUT = frozenset({"output"})
STATE = frozenset({"initial_state", "initial_normalizer", "return_state"})
NAMES = {2: "bfloat16", 4: "float32", 8: "float64"}
METHODS = {
    "linear": AttentionSpec(method=spec.Linear()),
    "linear, causal": AttentionSpec(method=spec.Linear(), masks=CAUSAL),
    "not normalized": AttentionSpec(method=spec.Linear(features="identity"), masks=CAUSAL),
    "gated": AttentionSpec(method=spec.Linear(rule="gated"), masks=CAUSAL),
    "delta": AttentionSpec(method=spec.Linear(rule="delta"), masks=CAUSAL),
    "gated delta": AttentionSpec(method=spec.Linear(rule="gated_delta"), masks=CAUSAL),
    "performer": AttentionSpec(method=spec.Performer()),
    "performer, causal": AttentionSpec(method=spec.Performer(), masks=CAUSAL),
    "linformer": AttentionSpec(method=spec.Linformer(rank=64, length=4096)),
    "linformer, shared": AttentionSpec(method=spec.Linformer(rank=16, length=4096, shared=True)),
    "nystrom": AttentionSpec(method=spec.Nystrom(landmarks=64)),
    "nystrom, few": AttentionSpec(method=spec.Nystrom(landmarks=16, iterations=2)),
}


def raw(
    of: AttentionSpec | None = None,
    *,
    batch=2,
    queries=512,
    new_keys=512,
    past=0,
    heads=4,
    kv_heads=4,
    head_dim=64,
    value_dim=64,
    itemsize=4,
    sizes: Sizes | None = None,
    inputs=("query", "key", "value"),
    sent=frozenset(),
    fine_gate=False,
    mask=(),
    bool_mask=False,
    padded=False,
    real_keys=0,
    offsets=(),
    dropped=False,
) -> BoundRequest:
    """A blank request, planned for one thread. ``mask``: the shape of its own, of four dimensions."""
    of = AttentionSpec() if of is None else of
    tokens, dtype = RequestSizes(batch, queries, new_keys, past), NAMES[itemsize]
    widths = Widths(heads, kv_heads, head_dim, value_dim)
    made = new_request(of, widths, dtype, tokens, sizes=sizes, inputs=inputs, sent=sent, threads=1)
    more = {}
    if mask:
        more["mask"] = np.zeros((), bool if bool_mask else DTYPES[dtype])
    if padded:
        more["key_mask"] = np.ones((), bool)
    if offsets:
        more["offsets"] = np.zeros((), np.int64)
    if fine_gate:
        more["gate"] = np.zeros((1, 1, 1, 1), DTYPES[dtype])
    made.arrays |= more
    made.dropout = WeightDropout(0.1, 0) if dropped else None
    return at_sizes(made, tokens._replace(mask=mask, real_keys=real_keys or past + new_keys, offsets=offsets))


def module(of: AttentionSpec | None = None, *, width=256, heads=4, kv_heads=4, biases=BIASES, **more) -> BoundRequest:
    """A blank request to a module; self-attention unless it says otherwise."""
    of, head = AttentionSpec() if of is None else of, width // heads
    head_dim, value_dim = more.pop("head_dim", head), more.pop("value_dim", head)
    sizes = Sizes(width, heads, kv_heads, head_dim, value_dim, width, width, biases, of)
    more = {"inputs": ("query",)} | more
    return raw(of, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, sizes=sizes, **more)


def approximate(name: str, **more) -> BoundRequest:
    """A raw request by a method, without a state's normalizer where there is none."""
    method = METHODS[name].method
    if not (isinstance(method, spec.Linear) and method.normalized) and "sent" in more:
        more["sent"] -= {"initial_normalizer"}
    return raw(METHODS[name], **{"queries": 1024, "new_keys": 1024, "head_dim": 32, "value_dim": 32} | more)


def resized(bound: BoundRequest, **sizes) -> BoundRequest:
    """The same request with other tokens."""
    return at_sizes(bound, sizes_of(bound).with_tokens(**sizes))


# ── what it costs ────────────────────────────────────────────────────────────────────────────────────────────────────


def forward_of(bound: BoundRequest, kernel, taps=OUTPUT, selection=EVERYTHING, **more) -> Forward:
    request = PLAIN.model_copy(update={"return_": sorted(taps)} | more)
    return Forward(bound, request, selection, kernel)


def gradients_of(bound: BoundRequest, kernel, *, taps=False, twice=False, checked=False, mask=True) -> Gradients:
    """Gradients of everything that comes in and is learned, and of every tap."""
    names = [name for name in INPUTS if name in bound.arrays and not (name == "mask" and (bound.bool_mask or not mask))]
    learned = [*(bound.learned if bound.module is None else bound.module.parameters)]
    sent = {name: bound.arrays[name] for name in names}
    listed = (TAPS if bound.spec.method.name == "exact" else ("q", "k", "v", "context")) if taps else ()
    directions = None
    if twice:
        of = bound.learned if bound.module is None else {n: _array(x) for n, x in bound.module.parameters.items()}
        directions = sent | dict(of)
    request = unsent(GradientsRequest, wrt=[], return_=[], edits=[], directions=directions, check=checked, **sent)
    targets = Targets(tuple(names), tuple(listed), tuple(learned))
    return Gradients(bound, request, Selection(), targets, kernel, checked_elements=1)


def _array(x: torch.Tensor) -> np.ndarray:
    """A parameter as an array that takes no memory, if it is blank."""
    name = torch_dtype_name(x.dtype)
    return np.broadcast_to(np.zeros((), DTYPES[name]), tuple(x.shape)) if x.is_meta else to_numpy(x)


def forward_seen(bound: BoundRequest, kernel: str, taps=OUTPUT, **more) -> Seen:
    whole = bool(more.get("report_error"))
    return seen(bound, kernel, lambda bound, by: forward_of(bound, by, taps, **more), whole=whole)


def gradients_seen(bound: BoundRequest, kernel: str, **how) -> Seen:
    twice = how.get("twice", False)
    return seen(bound, kernel, lambda bound, by: gradients_of(bound, by, **how), twice=twice, first="attention")
