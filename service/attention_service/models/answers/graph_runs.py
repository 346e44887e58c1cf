"""Differentiable runs of a model: L, and the tensors that it is differentiated by, as nodes of one graph."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor, nn

from attention_service.core.pullback import pullback
from attention_service.models.answers.objective import Objective
from attention_service.models.inputs.images.pair_inputs import PairInputs
from attention_service.models.inputs.prediction_head import Rows
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import NOTHING, AttentionPass, LayerTask
from attention_service.models.passes.attention_places import turns_of
from attention_service.models.passes.layer_states import LayerStates
from attention_service.models.passes.module_hooks import State, after, on_turn, one_by_one
from attention_transformers.model_layers import LayerKey

STATES: Final = frozenset({"hidden", "output"})
"""The states after a layer, and the output of its attention, which hooks take hold of."""
Point = tuple[LayerKey | None, str]
"""A layer and the name of something in it; no layer for the embeddings."""
EMBEDDINGS: Final[Point] = (None, "embeddings")


@dataclass
class GraphRun:
    """One differentiable run: L and the tensors that stand at each point."""

    value: Tensor
    answers: Tensor | None = None
    """The logits that predict the tokens of the given answers, if L is of them."""
    at: dict[Point, Tensor] = field(default_factory=dict)
    asking: AttentionPass = field(default_factory=lambda: AttentionPass({}))


class GraphRuns:
    """The runs over one input in which the same tensors are held."""

    def __init__(
        self, loaded: LoadedModel, checked: CheckedRequest, objective: Objective, traced: Sequence[str],
        states: Sequence[str],
    ) -> None:  # fmt: skip
        """``traced``: the taps, and ``states`` the named states, of each layer to differentiate by.

        Raises InvalidRequest for a model that has no gradients.
        """
        loaded.entering.check_differentiable("model", "ask for effects of edits, which need no gradients")
        self._loaded, self._checked = loaded, checked
        self._traced, self._states = traced, states
        self.objective = objective

    def name_tokens(self) -> None:
        """Find the likeliest token of each text, or place of a class, if the request names none."""
        objective, stack = self.objective, self._checked.inputs.predicted
        if objective.is_open:
            every = objective
            if objective.places is None:
                every = replace(objective, places=self._loaded.head.every(stack))
            with torch.no_grad():
                rows = self._rows(AttentionPass(self._tasks(())), every)
            self.objective = objective.named(rows, stack.mask)

    def run(
        self, shifts: "Mapping[Point, Tensor] | None" = None, scales: Sequence[float] | None = None, *,
        graph: bool = True,
    ) -> GraphRun:  # fmt: skip
        """Run the model, on a graph or without one.

        ``shifts``: what to put at some points. ``scales``: of the embeddings; the texts come once for each of them,
        one batch behind the other, and no layer is traced.
        """
        shifts, times = shifts or {}, 1 if scales is None else len(scales)
        asking = AttentionPass(self._tasks(self._traced if graph and scales is None else (), shifts, times))
        at: dict[Point, Tensor] = {}
        objective = self.objective if times == 1 else self.objective.repeated(times)
        with torch.set_grad_enabled(graph), self._holding(at, shifts, scales):
            rows = self._rows(asking, objective, times)
            value = objective.value(rows)
        at |= {(layer, tap): x for layer, taps in asking.traced.items() for tap, x in taps.items()}
        answers = rows.logits.detach() if graph and objective.answers is not None else None
        return GraphRun(value, answers, at, asking)

    def _rows(self, asking: AttentionPass, objective: Objective, times: int = 1) -> Rows:
        """The logits that L depends on, of the texts so many times."""
        loaded, arguments = self._loaded, self._checked.inputs.arguments
        if times > 1:
            arguments = {name: torch.cat([x] * times) for name, x in arguments.items()}
        with LayerStates(loaded.all_places, asking).reading((), output=False, hidden=False):
            stack = self._checked.inputs.predicted
            stack = stack if times == 1 else stack.repeated(times)
            return loaded.output_rows(arguments, asking, objective.places, stack)[0]

    def _tasks(
        self, traced: Sequence[str], shifts: "Mapping[Point, Tensor] | None" = None, times: int = 1
    ) -> dict[LayerKey, LayerTask]:
        found = {place.key: LayerTask(traced=traced) for place in self._checked.places}
        for key, edits in self._checked.edits.items():
            place = self._loaded.place_of(key)
            real = self._checked.keys(place).mask
            found[place.key] = replace(found.get(place.key, NOTHING), edits=edits, key_mask=real)
        for (layer, name), value in (shifts or {}).items():
            if layer is not None and name not in STATES:
                found[layer] = replace(found[layer], put={name: value})
        return found

    @contextmanager
    def _holding(
        self, at: dict[Point, Tensor], shifts: "Mapping[Point, Tensor]", scales: Sequence[float] | None
    ) -> Iterator[None]:
        """Take hold of the embeddings and of the states of layers, as nodes of the graph, until the block ends."""
        changes: dict[nn.Module, dict[int, list[State]]] = {}
        for place in self._checked.places:
            for name in self._states:
                module = place.layer if name == "hidden" else place.module
                change = place.batch_first(_held(at, (place.key, name), shifts))
                changes.setdefault(module, {}).setdefault(place.turn, []).append(change)
        with ExitStack() as stack:
            for module, turns in changes.items():
                each = {turn: one_by_one(several) for turn, several in turns.items()}
                stack.callback(after(module, on_turn(each, turns_of(module, self._loaded.all_places))))

            def embed(state: Tensor) -> Tensor | None:
                if EMBEDDINGS in at:  # the decoder's, by the same table
                    return None
                if state.requires_grad and scales is None and EMBEDDINGS not in shifts:  # by what sees the images
                    at[EMBEDDINGS] = state.view_as(state)
                    return at[EMBEDDINGS]
                state = state.detach() if scales is None else _scaled(state.detach(), scales)
                leaf = shifts.get(EMBEDDINGS, state)
                at[EMBEDDINGS] = leaf.clone().requires_grad_()
                return at[EMBEDDINGS].clone()  # CTRL scales it in place

            inputs, reader = self._checked.inputs, self._loaded.reader
            images = isinstance(reader, PairInputs) and reader.absent(inputs) == "text"
            stack.callback(self._loaded.entering.changing(embed, images=images))
            yield


def differentiated(run: GraphRun) -> dict[Point, Tensor]:
    """The gradient of L at each point of a run."""
    points = [*run.at]
    found = pullback([run.value], [run.at[point] for point in points], [torch.ones_like(run.value)])
    return dict(zip(points, found, strict=True))


def _scaled(state: Tensor, scales: Sequence[float]) -> Tensor:
    """Embeddings ``[points · B, L, d_model]`` times the scale of their point, rounded once."""
    wide = torch.promote_types(state.dtype, torch.float32)
    by_text = torch.tensor(scales, dtype=wide, device=state.device).repeat_interleave(len(state) // len(scales))
    return (state.to(wide) * by_text.view(-1, *(1 for _ in state.shape[1:]))).to(state.dtype)


def _held(at: dict[Point, Tensor], point: Point, shifts: "Mapping[Point, Tensor]") -> State:
    """Keep a state as a node of the graph of its own."""

    def change(state: Tensor) -> Tensor:
        if point in shifts:
            state = shifts[point]
        at[point] = state.view_as(state) if state.requires_grad else state.detach().requires_grad_()
        return at[point]

    return change
