"""The states that enter a model: what its table of tokens returns, or the states of patches or frames."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.module_hooks import State, turned
from attention_service.models.passes.points import ONCE, Site, changing
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
        table: nn.Module = getattr(self._reader.embedder(model), "get_input_embeddings", model.get_input_embeddings)()
        return table

    @cached_property
    def time_first(self) -> bool:
        """True if the table is asked for ``[L, B]`` tokens, as a short run shows."""
        if not any(place.time_first for place in self._places):
            return False
        shapes: list[torch.Size] = []
        with changing([(Site(self.table), lambda state: shapes.append(state.shape))]), torch.no_grad():
            self._run(self._reader.short_runs()[0])
        return shapes[0][0] != 1

    @cached_property
    def sites(self) -> Sequence[Site]:
        """The sites of the states that enter, of which a run passes one: a pair of encoders has one for each."""
        if self._reader.enters != "tokens":
            return [self._before_layers(media=False)]
        sites = [Site(self.table, turns=ONCE, batch_first=turned if self.time_first else None)]
        if any(place.queries == "media" for place in self._places):
            sites.append(self._before_layers(media=True))
        return sites

    def _before_layers(self, *, media: bool) -> Site:
        """The states before the first layer of a stack; ``media``: of that which sees images."""
        chosen = (place for place in self._places if media == (place.queries == "media"))
        first = next(chosen, self._places[0])
        layout = first.batch_first if first.channels_first else None
        return Site(first.first_layer, given=True, turns=ONCE, batch_first=layout)

    @cached_property
    def width(self) -> int | str:
        """The width of the states that enter, one of each token; or the reason for which edits do not reach them.

        A short run shows it.
        """
        if len(self.sites) > 1:
            return "its texts and its images enter two encoders"
        arguments, states = self._reader.short_runs()[0], list[Tensor]()
        with changing([(site, states.append) for site in self.sites]), torch.no_grad():
            self._run(arguments)
        if not states:
            return "its table of tokens is not what its layers read"
        shape, ids = states[0].shape, arguments.get("input_ids")
        if len(shape) != 3 or (ids is not None and shape[:2] != ids.shape[:2]):
            return "no single state of each token enters its layers"
        return shape[2]

    @cached_property
    def refusal(self) -> str | None:
        """The reason for which no output is differentiated by these states, as a short run shows; None if it is."""
        kept: dict[str, Tensor] = {}
        keep = kept_in_graph(kept, "text")
        try:
            with changing((site, keep) for site in self.sites), torch.enable_grad():
                made = self._run(self._reader.short_runs()[0])
                states = [x for x in made.values() if isinstance(x, Tensor) and x.requires_grad]
                if states:
                    torch.autograd.grad(states[0].sum(), [*kept.values()], allow_unused=True)
        except (*NOT_RUNNING, AssertionError) as fault:
            reason = str(fault).partition("\n")[0]
            return f"{type(self._model).__name__} cannot be differentiated by transformers ({reason})"
        return None


def kept_in_graph(kept: dict[KeyT, Tensor], key: KeyT) -> State:
    """Keep a state as a node of the graph; one that no node has made becomes a leaf."""

    def change(state: Tensor) -> Tensor:
        if state.requires_grad:
            kept[key] = state.view_as(state)
            return kept[key]
        kept[key] = state.detach().requires_grad_()
        return kept[key].clone()  # CTRL scales it in place

    return change
