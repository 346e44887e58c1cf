"""The states that enter a model's layers: the embeddings of its tokens, or the states of patches or frames."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_service.models.inputs.images.encoder_inputs import EncoderInputs
from attention_service.models.inputs.images.pair_inputs import PairInputs
from attention_service.models.inputs.images.prompt_inputs import PromptInputs
from attention_service.models.inputs.model_inputs import InputReader
from attention_service.models.inputs.sounds.sound_inputs import SoundInputs
from attention_service.models.inputs.sounds.sound_prompts import SoundPrompts
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.module_hooks import State, after, before, turned
from attention_service.models.passes.unrun_models import NOT_RUNNING

KeyT = TypeVar("KeyT")


class EnteringStates:
    """The place where the states of an input enter one model: behind its table of tokens, or before a first layer."""

    def __init__(
        self, model: PreTrainedModel, reader: InputReader, places: Sequence[AttentionPlace],
        run: Callable[[Mapping[str, Tensor]], Any],
    ) -> None:  # fmt: skip
        """``places``: all attentions of the model; ``run`` runs it over a few tokens."""
        self._model, self._reader, self._places, self._run = model, reader, places, run

    @cached_property
    def table(self) -> nn.Module:
        """The embeddings of the tokens of a text; of a model with an encoder, those of the encoder."""
        model: Any = self._model
        reads = model.get_encoder() if self._reader.pairs else model
        if isinstance(self._reader, PairInputs):
            reads = model.text_model
        found: nn.Module = getattr(reads, "get_input_embeddings", model.get_input_embeddings)()
        return found

    @cached_property
    def time_first(self) -> bool:
        """True if the table is asked for ``[L, B]`` tokens, as a short run shows."""
        if not any(place.time_first for place in self._places):
            return False
        shapes: list[torch.Size] = []
        remove = after(self.table, lambda state: shapes.append(state.shape))
        try:
            with torch.no_grad():
                self._run(self._reader.short_runs()[0])
        finally:
            remove()
        return shapes[0][0] != 1

    @cached_property
    def refusal(self) -> str | None:
        """The reason for which no output is differentiated by these states, as a short run shows; None if it is."""
        found: dict[str, Tensor] = {}
        remove = self.changing(kept_as_leaf(found, "text"))
        try:
            with torch.enable_grad():
                made = self._run(self._reader.short_runs()[0])
                states = [x for x in made.values() if isinstance(x, Tensor) and x.requires_grad]
                if states:
                    torch.autograd.grad(states[0].sum(), [*found.values()], allow_unused=True)
        except (*NOT_RUNNING, AssertionError) as fault:
            reason = str(fault).partition("\n")[0]
            return f"{type(self._model).__name__} cannot be differentiated by transformers ({reason})"
        finally:
            remove()
        return None

    def check_differentiable(self, param: str, instead: str) -> None:
        """Raise InvalidRequest, for the field ``param``, for a model that has no gradients."""
        if self.refusal is not None:
            raise InvalidRequest.at(param, f"{self.refusal}; {instead}")

    def changing(self, change: State, *, images: bool = False) -> Callable[[], None]:
        """Call ``change`` with the states ``[B, L, d_model]`` that enter. Returns the function that ends it.

        ``images``: those of the images, of a pair of encoders.
        """
        if images or isinstance(self._reader, EncoderInputs | PromptInputs | SoundInputs | SoundPrompts):
            chosen = (place for place in self._places if images == (place.queries == "media"))
            first = next(chosen, self._places[0])
            return before(first.first_layer, first.batch_first(change) if first.channels_first else change)
        return after(self.table, turned(change) if self.time_first else change)


def kept_as_leaf(found: dict[KeyT, Tensor], key: KeyT) -> State:
    """Keep the first states that enter as a leaf of the graph. The table of a text may be a decoder's too."""

    def change(state: Tensor) -> Tensor | None:
        if key in found:
            return None
        found[key] = state.detach().clone().requires_grad_()
        return found[key].clone()  # CTRL scales it in place

    return change
