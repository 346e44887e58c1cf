"""The plain forward pass on the CPU, of a module or of raw attention, by as few calls as give it.

The general way from a request to its output prepares for whatever a spec or a request may ask, which takes longer than
the smallest attention. Most ask for nothing but the output of softmax attention, causal or not; they are answered here.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.tensors import Array
from attention_service.core.arrays import TORCH_DTYPES, to_torch
from attention_service.core.bands import Band
from attention_service.core.masks import pattern_of
from attention_service.core.multihead import Parameters, project, project_jointly, project_out
from attention_service.core.plain import is_plain
from attention_service.core.scores import SCORES, Product
from attention_service.runtime.binding.bound import Bound, strip
from attention_service.runtime.operations.graphed import asks_for_little
from attention_service.runtime.scheduling.jobs import Fields

_DTYPES = {np.dtype(name): TORCH_DTYPES[name] for name in ("float32", "float64")}
"""Those of which a sum of squares says that it overflows; by numpy's own, since it takes long to say their names."""
_FEW = 2**13
"""Numbers that numpy adds up in less time than it takes to ask torch; with more of them it would begin threads."""


@dataclass(frozen=True)
class Direct:
    """How requests of one outline are answered directly."""

    scale: float
    causal: bool
    dtype: np.dtype[Any]
    """Of what is computed and answered."""
    most: float
    """Σ x² of the inputs of keys and values, up to which all keys and values are finite."""

    def run(self, bound: Bound) -> Fields | None:
        """The output as the reply's field; None for numbers that need the general way."""
        module, arrays = bound.module, bound.arrays
        if len(arrays) > 1 + ("key" in arrays) + ("value" in arrays):  # as what was padded has
            return None
        loaded = {}
        for name, x in arrays.items():
            # Queries may hold what they like, unless they are to be converted: then a large one must be told from
            # infinity.
            unbounded = name == "query" and "key" in arrays and x.dtype == self.dtype
            tensor = _loaded(x, self.dtype, math.inf if unbounded else self.most)
            if tensor is None:
                return None
            loaded[name] = tensor
        q = loaded["query"]
        k = loaded.get("key", q)
        v = loaded.get("value", k)
        del loaded, tensor  # what was converted is held no longer than it is needed
        # No inference mode: to enter it takes longer than what autograd does where nothing requires a gradient.
        if module is not None and module.joint is not None and k is q and v is q:
            q, k, v = project_jointly(module.joint, module.sizes, q)
        elif module is not None:
            q, k, v = project(module.parameters, module.sizes, q, k, v)
        context = scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=bound.heads != bound.kv_heads
        )
        if module is None:
            return {"output": strip(context, bound.layout, heads_axis=True).numpy()}
        del q, k, v  # the most is held by now
        output = project_out(module.parameters, context)
        return {"output": strip(output, bound.layout, heads_axis=False).numpy()}


def direct(bound: Bound, request: ForwardRequest, kernel: str, device: torch.device) -> Direct | None:
    """How to answer requests like this one directly; None where they ask for more."""
    module, spec = bound.module, bound.spec
    if device.type != "cpu" or bound.layout.merged or not asks_for_little(bound, request, kernel):
        return None
    score = SCORES.of(spec.score)
    if not is_plain(spec) or not isinstance(score, Product) or bound.own_key_dim is not None:
        return None
    nothing = torch.empty(0, bound.head_dim)
    scale = score.factors(nothing, nothing, {})[2] / spec.normalizer.temperature
    causal = bool(spec.masks)
    fits = bound.queries and bound.keys and bound.head_dim == bound.value_dim and scale > 0
    if not fits or (causal and not _looks_back(bound)):
        return None
    dtype = TORCH_DTYPES[bound.dtype]
    read = {array.dtype for array in bound.arrays.values()}
    if dtype not in _DTYPES.values() or not read <= _DTYPES.keys():
        return None
    held_in = bound.dtype if module is None else module.config.dtype
    if {bound.dtype, bound.reply_dtype, held_in} != {bound.dtype}:
        return None
    most = torch.finfo(dtype).max if module is None else _most(module.parameters, dtype)
    return Direct(scale, causal, np.dtype(bound.dtype), most)


def _looks_back(bound: Bound) -> bool:
    """Whether the masks say j ≤ i and nothing else."""
    band = pattern_of(bound.spec.masks, bound.queries, bound.keys)
    return isinstance(band, Band) and band.low is None and band.high == 0


def _loaded(x: Array, dtype: np.dtype[Any], most: float) -> torch.Tensor | None:
    """An array as a tensor of a dtype; None where Σ x² is more than ``most``, or no number, unless that is infinite."""
    if x.size <= _FEW:
        flat = x.reshape(-1)
        if most < math.inf and not float(np.vdot(flat, flat)) <= most:
            return None
        return to_torch(x if x.dtype == dtype else x.astype(dtype))  # torch would take ten times as long
    tensor = to_torch(x).to(_DTYPES[dtype])
    flat_tensor = tensor.reshape(-1)
    return tensor if most == math.inf or float(torch.dot(flat_tensor, flat_tensor)) <= most else None


def _most(parameters: Parameters, dtype: torch.dtype) -> float:
    """By |w·x + b| ≤ ‖w‖·‖x‖ + |b| (Cauchy-Schwarz), far enough from the largest number for what is rounded."""
    largest = torch.finfo(dtype).max / 16
    weights = [parameters[f"{role}_proj.weight"].double().norm(dim=1) for role in "kv"]
    given = [bias.double().abs() for role in "kv" if (bias := parameters.get(f"{role}_proj.bias")) is not None]
    rows, biases = (float(torch.cat([torch.zeros(1), *each]).max()) for each in (weights, given))
    if not (rows + biases) < largest:  # or not a number
        return -1.0
    norm = (largest - biases) / max(rows, 1.0)
    return norm**2 if norm < math.sqrt(largest) else largest
