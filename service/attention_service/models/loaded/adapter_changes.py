"""The change that an adapter makes to one module of its base, ready to be added to the module's output."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attention_contract.errors import InvalidCheckpoint
from attention_service.core.tensors import is_finite, torch_dtype_name
from attention_service.models.passes.float64_runs import copied_module
from attention_service.modules.checkpoints.adapter_files import MERGE, ModuleChange


@dataclass
class AppliedChange:
    """The change of one module, ready to be added to its output."""

    down: Tensor | None = None
    """A ``[r, in]``; of an embedding its transpose, ``[tokens, r]``."""
    up: Tensor | None = None
    """s·B ``[out, r]``, times DoRA's factor."""
    offset: Tensor | None = None
    """``[out]``: the bias of B, with the same factors."""
    gain: Tensor | None = None
    """``[out]``: DoRA's factor less 1, of the output without its bias."""
    replaced: nn.Module | None = None
    """The module with parameters of the adapter."""
    embeds: bool = False

    def rows(self, module: nn.Module, args: Sequence[Any], options: Mapping[str, Any], output: Any) -> Any:
        """The output of a module all of whose rows are the adapter's."""
        if self.replaced is not None:
            output = as_wide(self.replaced, output)(*args, **options)
        if self.gain is not None:
            output = output + (self.gain * without_bias(module, output)).to(output.dtype)
        if self.down is None or self.up is None:
            return output
        return add_change(output, project_down(args[0], self.down, embeds=self.embeds), self.up, self.offset)


def applied_change(
    name: str, path: str, change: ModuleChange, module: nn.Module, model: PreTrainedModel
) -> AppliedChange | None:
    """A change, ready for its module; None if it changes nothing. Raises InvalidCheckpoint if it does not fit."""
    made = AppliedChange(replaced=_replaced(name, path, change, module), embeds=change.embeds)
    if change.down is None or change.up is None:
        return None if made.replaced is None else made
    weight: Any = getattr(module if made.replaced is None else made.replaced, "weight", None)
    if not isinstance(module, nn.Embedding if change.embeds else nn.Linear | Conv1D):
        raise InvalidCheckpoint.at(
            "adapter", f"{name} changes {path}, a {type(module).__name__}, and only adapters of linear layers and "
            f"embeddings are read; {MERGE}"
        )  # fmt: skip
    turned = isinstance(module, Conv1D | nn.Embedding)
    shape = (len(change.up), change.down.shape[1])
    stored = tuple(weight.shape[::-1] if turned else weight.shape)
    if shape != stored:
        raise InvalidCheckpoint.at(
            "adapter", f"{name} changes {path} from {shape[1]} to {shape[0]} numbers, and that of its base is from "
            f"{stored[1]} to {stored[0]}: it is of another base"
        )  # fmt: skip
    device, dtype = model.device, torch.promote_types(model.dtype, torch.float32)
    up = change.up.to(device, dtype) * change.scale
    offset = None if change.up_bias is None else change.up_bias.to(device, dtype) * change.scale
    if change.magnitude is not None:
        if weight.is_meta:
            raise InvalidCheckpoint.at("adapter", f"{name} is a DoRA, and {path} of its base stays on disk; {MERGE}")
        factor = change.gain(weight.cpu(), transposed=isinstance(module, Conv1D)).to(device, dtype)
        made.gain = factor - 1
        up = up * factor[:, None]
        offset = None if offset is None else offset * factor
    if change.embeds:
        up = up * float(getattr(module, "embed_scale", 1.0))
    down = change.down.to(device, dtype)
    made.down, made.up, made.offset = down.T.contiguous() if change.embeds else down, up, offset
    for what, x in (("s·B", up), ("DoRA's factor", made.gain), ("s times the bias of B", offset)):
        if x is not None and not is_finite(x):
            raise InvalidCheckpoint.at(
                "adapter", f"{name} changes {path}, and {what} is not finite in {torch_dtype_name(dtype)}: check "
                "lora_alpha, alpha_pattern and the magnitudes of its config and tensors"
            )  # fmt: skip
    return made


def _replaced(name: str, path: str, change: ModuleChange, module: nn.Module) -> nn.Module | None:
    """The module with the parameters that the adapter brings; None if these are its own. Raises InvalidCheckpoint."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    made: Any = None
    for parameter, value in change.replaced.items():
        if parameter not in own or any(True for _ in module.children()):
            raise InvalidCheckpoint.at(
                "adapter", f"{name} brings {path}.{parameter}, and its base has no place for it; {MERGE}"
            )
        former = own[parameter]
        if former.shape != value.shape:
            raise InvalidCheckpoint.at(
                "adapter",
                f"{name} brings {path}.{parameter} of shape {list(value.shape)}, and its base has one of "
                f"{list(former.shape)}; give the base that shape (resize_token_embeddings) and save it, or {MERGE}",
            )
        same = value.to(former.device, former.dtype)
        if torch.equal(same, former):
            continue
        if made is None:
            made = copied_module(module)
        values = made._parameters if parameter in made._parameters else made._buffers
        values[parameter] = nn.Parameter(same, requires_grad=False) if values is made._parameters else same
    replacement: nn.Module | None = made
    return replacement


def project_down(x: Tensor, down: Tensor, *, embeds: bool) -> Tensor:
    """A·x ``[…, r]``."""
    if embeds:
        return functional.embedding(x, down)
    if x.dtype == down.dtype:
        return functional.linear(x, down)
    wide = torch.promote_types(x.dtype, down.dtype)
    return functional.linear(x.to(wide), down.to(wide))


def add_change(output: Tensor, low: Tensor, up: Tensor, offset: Tensor | None) -> Tensor:
    """The output with B·A·x, in the output's dtype."""
    if offset is None and low.dtype == up.dtype == output.dtype:
        rows = output.reshape(-1, output.shape[-1])
        return torch.addmm(rows, low.reshape(-1, low.shape[-1]), up.T).view(output.shape)
    change = functional.linear(low, up.to(low.dtype))
    return (output + (change if offset is None else change + offset)).to(output.dtype)


def without_bias(module: nn.Module, output: Tensor) -> Tensor:
    """An output less the bias of its module."""
    bias = getattr(module, "bias", None)
    return output if bias is None else output - bias


def as_wide(module: nn.Module, output: Any) -> nn.Module:
    """A module in the dtype of an output, which is another while gradients are checked in float64."""
    first = next(iter(module.parameters()), None)
    if first is None or not isinstance(output, Tensor) or first.dtype == output.dtype:
        return module
    return copy.deepcopy(module).to(output.dtype)
