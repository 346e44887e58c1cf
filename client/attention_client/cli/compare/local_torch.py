"""A torch module on this machine as one side of a comparison. Needs torch.

A Python file is run, since its author asked for it; tensors are read from safetensors alone, and nothing is unpickled.
"""

import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn


class LocalModuleError(ValueError):
    """A file does not give a module."""


@dataclass(frozen=True)
class LocalModule:
    """A torch module that takes ``query [B, Lq, d_model]``, or query, key and value, batch first."""

    label: str
    module: nn.Module

    @property
    def d_model(self) -> int | None:
        """Width of the query, if the module says."""
        width = getattr(self.module, "embed_dim", None)
        return width if isinstance(width, int) else None

    def run(self, inputs: Mapping[str, NDArray[Any]], upstream: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        """Return output, weights if the module gives them, and the inputs' gradients for an upstream gradient."""
        dtype = next((parameter.dtype for parameter in self.module.parameters()), torch.float32)
        given = {
            name: torch.from_numpy(np.array(inputs[name])).to(dtype).requires_grad_(upstream is not None)
            for name in ("query", "key", "value")
            if name in inputs
        }
        called = {name: x if self._batch_first else x.transpose(0, 1) for name, x in given.items()}
        if isinstance(self.module, nn.MultiheadAttention):
            key = called.get("key", called["query"])
            output, weights = self.module(
                called["query"], key, called.get("value", key), need_weights=True, average_attn_weights=False
            )
        else:
            returned = self.module(*called.values())
            output, weights = returned[:2] if isinstance(returned, tuple) else (returned, None)
        output = output if self._batch_first else output.transpose(0, 1)
        tensors = {} if not isinstance(weights, torch.Tensor) or weights.ndim != 4 else {"weights": weights}
        tensors["output"] = output
        if upstream is not None:
            output.backward(torch.from_numpy(np.array(upstream)).to(dtype))
            tensors |= {f"∂L/∂{name}": x.grad for name, x in given.items() if x.grad is not None}
        return {name: x.detach().double().numpy() for name, x in tensors.items()}

    @property
    def _batch_first(self) -> bool:
        return bool(getattr(self.module, "batch_first", True))


def from_file(text: str, num_heads: int | None) -> LocalModule:
    """Read ``file.py:name``, a function without arguments that makes a module, or a state dict in safetensors.

    A state dict is that of ``nn.MultiheadAttention``, which does not hold the number of heads. Raises LocalModuleError.
    """
    path, _, name = text.rpartition(":")
    module = _made(path, name) if path.endswith(".py") else _loaded(text, num_heads)
    return LocalModule(text, module.eval())


def _made(path: str, name: str) -> nn.Module:
    try:
        names_of_file = runpy.run_path(path)
    except OSError as fault:
        raise LocalModuleError(f"{path}: {fault.strerror or fault}") from None
    if name not in names_of_file:
        raise LocalModuleError(f"{path} has no {name!r}")
    made = names_of_file[name] if isinstance(names_of_file[name], nn.Module) else names_of_file[name]()
    if not isinstance(made, nn.Module):
        raise LocalModuleError(f"{path}: {name} gives a {type(made).__name__}; expected a torch.nn.Module")
    return made


def _loaded(path: str, num_heads: int | None) -> nn.Module:
    state = load_file(Path(path))
    if "out_proj.weight" not in state or not {"in_proj_weight", "q_proj_weight"} & state.keys():
        raise LocalModuleError(
            f"{path} holds {', '.join(sorted(state)[:8])}; expected the state dict of nn.MultiheadAttention"
        )
    if num_heads is None:
        raise LocalModuleError(f"{path}: a state dict does not tell the number of heads; give --heads")
    width = state["out_proj.weight"].shape[0]
    if width % num_heads:
        raise LocalModuleError(f"{path}: {num_heads} heads do not divide its width {width}")
    separate = "q_proj_weight" in state
    module = nn.MultiheadAttention(
        width,
        num_heads,
        bias="in_proj_bias" in state,
        add_bias_kv="bias_k" in state,
        kdim=state["k_proj_weight"].shape[1] if separate else None,
        vdim=state["v_proj_weight"].shape[1] if separate else None,
        batch_first=True,
        dtype=state["out_proj.weight"].dtype,
    )
    try:
        module.load_state_dict(state)
    except RuntimeError as fault:
        raise LocalModuleError(f"{path}: {fault}") from None
    return module
