"""A model's own way from the states behind its last layer to logits, for any states.

The model itself runs, over texts of one token whose layers are passed over: each returns the states that are to be
read. So whatever stands behind the layers acts as it does in a pass: norms, projections, caps and factors.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_contract.errors import InvalidRequest
from attention_service.core.tensors import wide
from attention_service.models.inputs.input_stacks import Tokens
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.module_hooks import replaced, with_first

LOGITS_AT_ONCE: Final = 2**24
"""Logits that are made at once."""


@dataclass(frozen=True, eq=False)
class LensReadout:
    """The way of one model."""

    loaded: LoadedModel
    returned: Mapping[nn.Module, Any]
    """The output of each layer in a short run; its first entry is the states."""
    time_first: Collection[nn.Module] = ()
    """The layers that pass on states ``[L, B, d]``."""
    encoded: Any = None
    """The output of the encoder in that run, of a model that has one."""

    @property
    def width(self) -> int:
        """The number of entries of a state."""
        return int(self.loaded.model.config.get_text_config().hidden_size)

    @property
    def rows(self) -> int:
        """The states that are read at once."""
        return max(1, LOGITS_AT_ONCE // self.loaded.reader.predictable)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """The logits ``[N, V]`` of states ``[N, …, d]``."""
        loaded, reader = self.loaded, self.loaded.reader
        states = states[:, None].to(loaded.model.dtype)
        one = reader.batch([Tokens([1], [None])])
        texts = replace(one, ids=one.ids.expand(len(states), 1))
        arguments: dict[str, Any] = reader.arguments(texts)
        if reader.pairs:
            arguments = {"decoder_input_ids": texts.ids}
        options = loaded.options(arguments)
        if reader.pairs:
            options["encoder_outputs"] = with_first(self.encoded, states)
        with loaded.attention.running(AttentionPass({})), self._passing_over(states):
            logits: Tensor = loaded.model(**options).logits
        return wide(logits[:, -1])

    @contextmanager
    def _passing_over(self, states: Tensor) -> Iterator[None]:
        """Let every layer return these states until the block ends."""
        with ExitStack() as stack:
            for layer, returned in self.returned.items():
                replaced_output = with_first(returned, states.transpose(0, 1) if layer in self.time_first else states)
                stack.callback(replaced(layer, lambda *_, _output=replaced_output, **__: _output))
            yield

    def check(self, states: Tensor, logits: Tensor, tolerance: float) -> None:
        """Raise InvalidRequest unless states ``[B, L, …, d]`` behind the last layer give these logits."""
        try:
            read_out = self.logits(states.flatten(0, 1)).view(logits.shape)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as fault:
            raise InvalidRequest.at(
                "kind",
                f"{self._name} does not run over states of single tokens in place of its layers' (it says: {fault})",
            ) from fault
        if bool((read_out - wide(logits)).norm() > tolerance * wide(logits).norm()):
            raise InvalidRequest.at(
                "kind",
                f"the logits of {self._name} do not depend on the states behind its last layer alone, so no lens "
                "can read it",
            )

    @property
    def _name(self) -> str:
        return type(self.loaded.model).__name__


def check_has_unembedding(loaded: LoadedModel, param: str) -> None:
    """Raise InvalidRequest for a model that predicts no tokens of a text, of which there is nothing to read states by.

    One that predicts the token at its own place, such as BERT, reads them by its whole head.
    """
    head = loaded.head
    if head.predicts == "next" or (head.predicts == "own" and loaded.model.main_input_name == "input_ids"):
        return
    name = type(loaded.model).__name__
    why = loaded.without_head if head.predicts is None else f"{name} predicts no tokens of a text"
    raise InvalidRequest.at(param, f"{why}, so a lens has no unembedding to read by")


def every_layer(loaded: LoadedModel) -> Sequence[nn.Module]:
    """Return the layers of every stack that reads tokens, in the order in which they are listed."""
    stacks = dict.fromkeys(layers for place in loaded.all_places if (layers := list_of(loaded, place.layer)))
    return [layer for stack in stacks for layer in stack]


def list_of(loaded: LoadedModel, layer: nn.Module) -> nn.ModuleList | None:
    """The list that a layer stands in; None for a layer that is in none."""
    lists = (module for module in loaded.model.modules() if isinstance(module, nn.ModuleList))
    return next((candidates for candidates in lists if any(one is layer for one in candidates)), None)
