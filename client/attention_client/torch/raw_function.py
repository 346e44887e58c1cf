"""``remote_attention``: raw attention of the service over torch tensors, with gradients."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from attention_client.arguments import DropoutLike, EditLike, SpecLike
from attention_client.torch.attention_function import PARAMETERS, RemoteCall, attend
from attention_client.torch.connection import ClientLike, Connection
from attention_contract import operations
from attention_contract.schemas.attention import KernelName

_TENSORS: Final = frozenset(
    {"mask", "key_mask", "key_lengths", "global_mask", "past_key", "past_value", "gate", "beta", "initial_state"}
    | {"initial_normalizer", "offsets", "positions"}
)
_TAPS: Final = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")


def remote_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    spec: SpecLike | None = None,
    client: ClientLike | Connection = None,
    taps: Sequence[str] = (),
    parameters: Mapping[str, Tensor] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    dropout: DropoutLike | None = None,
    edits: Sequence[EditLike] = (),
    kernel: KernelName | None = None,
    **inputs: Tensor | None,
) -> Any:
    """Return the output of raw attention, computed by the service; with ``taps``, also a dict of these by name.

    ``query [B, H, Lq, D]``, ``key [B, Hkv, Lk, D]`` (default: the query), ``value [B, Hkv, Lk, Dv]`` (default: the
    key), or ``[B, L, H·D]`` with ``num_heads``; the output has the query's layout, device and dtype. ``inputs``: mask,
    key_mask, key_lengths, global_mask, past_key, past_value, gate, beta, initial_state, initial_normalizer, offsets and
    positions, as ``client.attention.forward`` takes them. A boolean ``mask`` is True where a query may look.
    ``parameters``: the learned tensors of the spec. ``taps``: q, k, v, scores, capped_scores, masked_scores, weights,
    context.

    Gradients of first and second order reach query, key, value, a float mask, the past, states, gates and parameters,
    from the output and from every tap. Raises ValueError for an input or tap that is not known and for an edit whose
    value needs a gradient, and what the client raises.
    """
    if unknown := inputs.keys() - _TENSORS:
        raise ValueError(
            f"{min(unknown)}: not an input of raw attention; expected one of {', '.join(sorted(_TENSORS))}"
        )
    if unknown := set(taps) - set(_TAPS):
        raise ValueError(f"taps: {min(unknown)!r} has no gradient; expected one of {', '.join(_TAPS)}")
    if any(_needs_gradient(edit) for edit in edits):
        raise ValueError("edits: value and add cannot receive a gradient; detach them")
    connection = client if isinstance(client, Connection) else Connection(client)
    tensors = {"query": query, "key": key, "value": value} | inputs
    tensors |= {f"{PARAMETERS}{name}": x for name, x in (parameters or {}).items()}
    sent = {name: torch.as_tensor(x) for name, x in tensors.items() if x is not None}
    options = {
        "spec": spec, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "dropout": dropout, "kernel": kernel,
        "edits": [*edits] or None,
    }  # fmt: skip
    call = RemoteCall(
        send=connection.attend,
        send_plain=connection.attend,
        forward=operations.raw_forward,
        kept_forward=operations.create_raw_pass,
        gradients=operations.raw_gradients,
        names=tuple(sent),
        options=options,
        taps=tuple(taps),
    )
    output, *others = attend(call, tuple(sent.values()))
    return (output, dict(zip(taps, others, strict=True))) if taps else output


def _needs_gradient(edit: EditLike) -> bool:
    brought: list[Any] = [
        edit.get(name) if isinstance(edit, Mapping) else getattr(edit, name) for name in ("value", "add")
    ]
    return any(isinstance(x, Tensor) and x.requires_grad for x in brought)
