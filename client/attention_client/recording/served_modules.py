"""The attention of a transformers model in modules that a server imports from the model's checkpoint.

The server says which tensor of the checkpoint holds each parameter. The submodules of the model that own these tensors
project queries, keys and outputs: the input of the first is the module's query, and the module's output takes the place
of that of the last. No family of models is known here.
"""

import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from attention_client.array_likes import as_array
from attention_client.calls.module_calls import imports_of
from attention_contract.errors import AttentionError, ModuleExists
from attention_contract.schemas.attention import Tap
from attention_contract.schemas.checkpoints import CheckpointAttention
from attention_contract.schemas.modules import ModuleInfo
from attention_contract.tensors import Array

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attention_client.client import Client

_STATISTICS = ("mean", "std", "min", "max", "norm")


class NotServedError(Exception):
    """The server has no modules for the attention of a model; the text is the reason."""


@dataclass(frozen=True)
class ProjectionModules:
    """The submodules of a model that own the projections of one attention."""

    attention: CheckpointAttention
    query: nn.Module
    key: nn.Module
    output: nn.Module


@dataclass
class ServedModules:
    """A model whose attention runs in modules of a server, and the taps of each call."""

    model: "PreTrainedModel"
    client: "Client"
    taps: Sequence[Tap]
    lengths: Collection[int]
    """The numbers of tokens that the model reads."""
    calls: list[tuple[CheckpointAttention, dict[str, Array]]] = field(default_factory=list)
    """The taps of each call without the batch dimension, in the order of the calls."""

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """The taps by their names in a recording. Layers that share one attention are counted as they come."""
        shared = len(self.calls) > len({attention.name for attention, _ in self.calls})
        for count, (attention, taps) in enumerate(self.calls):
            number = count if shared else attention.layer
            stack = attention.stack if self.model.config.is_encoder_decoder else "layers"
            cross = ".cross" if attention.part == "cross" else ""
            for tap, array in taps.items():
                yield f"{stack}.{number}{cross}.{tap}", array

    @contextmanager
    def replacing(self, projections: ProjectionModules, module: str) -> Iterator[None]:
        """Let a module of the server answer one attention, until the block ends.

        The model still projects and attends, and the result is dropped.
        """
        attention = projections.attention
        inputs: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            return lambda _module, args, kwargs: inputs.__setitem__(name, (*args, *kwargs.values())[0])

        def answer(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            if inputs["query"].shape[:-1] not in {(1, length) for length in self.lengths}:
                raise NotServedError(f"{type(self.model).__name__} pads or folds its sequences")
            key = as_array(inputs["key"]) if attention.part == "cross" else None
            reply = self.client.forward(module, as_array(inputs["query"]), key, return_=["output", *self.taps])
            self.calls.append((attention, {tap: np.array(as_array(getattr(reply, tap))[0]) for tap in self.taps}))
            return torch.as_tensor(np.array(reply.output, np.float64)).to(output)

        hooks = [
            projections.query.register_forward_pre_hook(keep("query"), with_kwargs=True),
            projections.key.register_forward_pre_hook(keep("key"), with_kwargs=True),
            projections.output.register_forward_hook(answer),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def serve(
    model: "PreTrainedModel", client: "Client", checkpoint: str, taps: Sequence[Tap], lengths: Collection[int]
) -> Iterator[ServedModules]:
    """Run the attention of a model in modules imported from its checkpoint, until the block ends.

    Resident modules of the same content are used. The others are made in the server's memory alone, and are deleted at
    the end. The model is called with one sequence without padding, of ``lengths`` tokens in each stack. Raises
    NotServedError if an attention cannot be imported, or if the checkpoint is not the model's; the model does so when
    it pads the sequence.
    """
    served = ServedModules(model, client, taps, lengths)
    with ExitStack() as stack:
        try:
            checkpoint_reply = client.checkpoints.get(checkpoint)
            imports = imports_of(checkpoint_reply, {})
            projections = [_projections(model, attention) for attention in checkpoint_reply.attentions]
            resident = {module.name: module for module in client.modules.list().modules}
            modules = [
                stack.enter_context(_imported(client, arguments, resident.get(arguments["name"])))
                for arguments in imports
            ]
            for projection, module in zip(projections, modules, strict=True):
                _check_same(client, module, projection)
        except AttentionError as fault:
            raise NotServedError(str(fault)) from fault
        for projection, module in zip(projections, modules, strict=True):
            stack.enter_context(served.replacing(projection, module))
        yield served


def _projections(model: "PreTrainedModel", attention: CheckpointAttention) -> ProjectionModules:
    """Find the projections of an attention in the model. Raises NotServedError where they have other names."""
    if model.config.is_encoder_decoder and attention.stack not in {"encoder", "decoder"}:
        raise NotServedError(f"{attention.name} is neither of the encoder nor of the decoder")
    first = ("q_down", "q_proj"), ("kv_down", "k_proj"), ("o_proj",)  # whose input is the block's, or output
    named = [next(f"{name}.weight" for name in kinds if f"{name}.weight" in attention.tensors) for kinds in first]
    owners = [_owner(model, attention.tensors[name]) for name in named]
    return ProjectionModules(attention, *owners)


def _owner(model: nn.Module, tensor: str) -> nn.Module:
    """The submodule that owns a tensor of the checkpoint, whose name may begin with that of a larger model."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    path = tensor.rpartition(".")[0]
    while path and path not in modules:
        path = path.partition(".")[2]
    if not path:
        raise NotServedError(f"{type(model).__name__} has no submodule that owns {tensor}")
    return modules[path]


@contextmanager
def _imported(client: "Client", arguments: dict[str, Any], resident: ModuleInfo | None) -> Iterator[str]:
    """Import one attention and yield the module's name; a module that this makes is deleted at the end.

    ``resident`` is the module of the default name. A new one gets a name that no other recording uses, so that none
    deletes it meanwhile.
    """
    if resident is not None and _has_content(client, arguments, resident):
        yield resident.name
        return
    name = f"recording-{secrets.token_hex(6)}"
    client.modules.import_(**arguments | {"name": name}, durable=False)
    try:
        yield name
    finally:
        client.modules.delete(name)


def _has_content(client: "Client", arguments: dict[str, Any], resident: ModuleInfo) -> bool:
    """True if an import would make a module of the same content. The resident one stays as it is."""
    try:
        client.modules.import_(**arguments, durable=resident.durable)
    except ModuleExists:
        return False
    return True


def _check_same(client: "Client", module: str, projections: ProjectionModules) -> None:
    """Raise NotServedError unless the output projections of a module and the model have the same numbers."""
    listed = client.modules.parameters(module).parameters
    theirs = next(parameter for parameter in listed if parameter.name == "o_proj.weight")
    weight: Any = projections.output.weight
    own = as_array(weight.detach()).astype(np.float64)
    numbers = own.mean(), own.std(), own.min(), own.max(), np.sqrt((own**2).sum())
    if not np.allclose(numbers, [getattr(theirs, name) for name in _STATISTICS], rtol=1e-3, atol=1e-6):
        raise NotServedError(f"{projections.attention.name} has other parameters than the model")
