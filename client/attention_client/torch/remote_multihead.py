"""``RemoteMultiheadAttention``: ``torch.nn.MultiheadAttention`` whose passes run on the service."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention_client.torch.attention_function import PARAMETERS, RemoteCall, attend
from attention_client.torch.connection import ClientLike, Connection
from attention_client.torch.torch_masks import MaskSizes, request_masks
from attention_contract import operations

_MAX_SEED = 2**31
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


class RemoteMultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with the same constructor, parameters and numbers, computed by the service.

    ``client`` is a ``Client``, a server's URL, or None for the environment's ``ATTENTION_URL``; modules with one client
    share its connections. The parameters are the local ones: each request brings them to a module on the server that
    holds their config alone, so an optimizer changes them as always and nothing is stored.

    Two numbers differ from torch's, on purpose. A query that may look nowhere gets zeros and no gradient, where torch
    gives NaN with ``need_weights``. Weights that are returned are those before dropout; dropout itself draws its seed
    from torch's generator, and the backward pass drops the same weights.

    A deep copy shares the client; a pickle holds its settings, and a forked process connects anew.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        client: ClientLike | Connection = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.connection = client if isinstance(client, Connection) else Connection(client)

    @classmethod
    def of(cls, module: nn.MultiheadAttention, client: ClientLike | Connection = None) -> "RemoteMultiheadAttention":
        """Return a module like a local one: it has the same parameters, not copies, and the same mode."""
        made = cls(
            module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
            module.bias_k is not None, module.add_zero_attn, module.kdim, module.vdim, module.batch_first,
            device="meta", client=client,
        )  # fmt: skip
        for name in made._parameters:
            setattr(made, name, getattr(module, name))
        made.bias_k, made.bias_v, made.out_proj = module.bias_k, module.bias_v, module.out_proj
        return made.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and the weights, as ``torch.nn.MultiheadAttention.forward`` does with these arguments.

        query ``[Lq, B, embed_dim]``, key ``[Lk, B, kdim]``, value ``[Lk, B, vdim]``; with ``batch_first``, B first;
        without a batch, no B. key_padding_mask ``[B, Lk]``, attn_mask ``[Lq, Lk]`` or ``[B·H, Lq, Lk]``: bool, True
        forbids; or float, added to the scores. ``is_causal`` alone masks causally; beside a mask it says that the mask
        is causal. The weights are ``[B, Lq, Lk]``, or ``[B, H, Lq, Lk]`` without ``average_attn_weights``; None without
        ``need_weights``, which saves their transfer. Raises ValueError for shapes that do not fit, and what the client
        raises.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "nested tensors cannot be sent; pad them and pass key_padding_mask. nn.TransformerEncoder makes them "
                "unless it gets enable_nested_tensor=False"
            )
        batched = query.dim() == 3
        inputs = {"query": query} | ({} if key is query else {"key": key}) | ({} if value is key else {"value": value})
        if any(x.dim() != query.dim() or x.dim() not in {2, 3} for x in inputs.values()):
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items())
            raise ValueError(f"expected query, key and value of 3 dimensions, or of 2 without a batch; got {shapes}")
        tensors = {name: self._batch_first(x) for name, x in inputs.items()}
        keys = tensors.get("key", tensors["query"]).shape[1]
        sizes = MaskSizes(tensors["query"].shape[0], self.num_heads, tensors["query"].shape[1], keys)
        causal = is_causal and (attn_mask is None or (key_padding_mask is None and not need_weights))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        tensors |= request_masks(None if causal else attn_mask, key_padding_mask, sizes, query.dtype)
        tensors |= {f"{PARAMETERS}{name}": x for name, x in self._parameters_by_name().items()}
        options: dict[str, Any] = {}
        if self.training and self.dropout > 0:
            options["dropout"] = {"p": self.dropout, "seed": int(torch.randint(_MAX_SEED, ()))}
        call = RemoteCall(
            send=partial(self.connection.attend_by, self._config(causal=causal)),
            send_plain=self.connection.attend,
            forward=operations.forward,
            kept_forward=operations.create_pass,
            gradients=operations.gradients,
            names=tuple(tensors),
            options=options,
            taps=("weights",) if need_weights else (),
            averaged_heads=self.num_heads if average_attn_weights else 0,
        )
        output, *weights = attend(call, tuple(tensors.values()))
        if not batched:
            return output[0], weights[0][0] if need_weights else None
        return output if self.batch_first else output.transpose(0, 1), weights[0] if need_weights else None

    def extra_repr(self) -> str:
        """Return the server, for ``repr``."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, connection={self.connection!r}"

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _config(self, *, causal: bool) -> dict[str, Any]:
        """The config of a module on the server that computes the same."""
        spec: dict[str, Any] = {"masks": [{"name": "causal", "align": "top_left"}] if causal else []}
        spec |= {"add_bias_kv": self.bias_k is not None, "add_zero_attn": self.add_zero_attn}
        return {
            "d_model": self.embed_dim,
            "num_heads": self.num_heads,
            "key_width": self.kdim,
            "value_width": self.vdim,
            "bias": self.in_proj_bias is not None,
            "dtype": _DTYPES[self.out_proj.weight.dtype],
            "spec": spec,
        }

    def _parameters_by_name(self) -> dict[str, Tensor]:
        """The parameters under the service's names: views of torch's."""
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        parameters = {f"{role}_proj.weight": weight for role, weight in zip("qkv", weights, strict=True)}
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
            parameters |= {f"{role}_proj.bias": bias for role, bias in zip("qkv", biases, strict=True)}
            parameters["o_proj.bias"] = self.out_proj.bias
        if self.bias_k is not None and self.bias_v is not None:
            parameters |= {"bias_k": self.bias_k.flatten(), "bias_v": self.bias_v.flatten()}
        return parameters | {"o_proj.weight": self.out_proj.weight}

    def _reset_parameters(self) -> None:
        # False keeps nn.TransformerEncoderLayer from its fast path, which would compute this attention by itself.
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False
