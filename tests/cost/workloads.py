"""Workloads of a few MiB, raw and of modules, exact and of every method that approximates."""

from dataclasses import replace

from attention_contract import spec
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec
from attention_service.core.multihead import Sizes
from attention_service.cost import Workload

BIASES = Biases(q_proj=True, k_proj=True, v_proj=True, o_proj=True)
CAUSAL = [spec.Causal()]
STATE = frozenset({"initial_state", "initial_normalizer", "return_state"})
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


def raw(*, batch=2, queries=512, keys=512, heads=4, kv_heads=4, head_dim=64, value_dim=64, itemsize=4, **more):
    return Workload(batch, queries, keys, heads, kv_heads, head_dim, value_dim, itemsize, threads=1, **more)


def module(width=256, heads=4, kv_heads=4, **more):
    head = width // heads
    sizes = Sizes(width, heads, kv_heads, head, head, width, width, BIASES, more.get("spec", AttentionSpec()))
    more = {"inputs": frozenset({"query"})} | more
    return raw(heads=heads, kv_heads=kv_heads, head_dim=head, value_dim=head, sizes=sizes, **more)


def with_gates(work: Workload) -> Workload:
    """The same with the gates that its rule reads, and without a state's normalizer where there is none."""
    method, sent = work.spec.method, work.sent
    if isinstance(method, spec.Linear) and work.sizes is None:
        sent |= {gate for gate, rule in (("gate", "gated"), ("beta", "delta")) if rule in method.rule}
    if not (isinstance(method, spec.Linear) and method.normalized):
        sent -= {"initial_normalizer"}
    return replace(work, sent=sent)


def approximate(name: str, **more) -> Workload:
    """A raw workload of a method."""
    sizes = {"queries": 1024, "keys": 1024, "head_dim": 32, "value_dim": 32, "spec": METHODS[name]}
    return with_gates(raw(**sizes | more))
