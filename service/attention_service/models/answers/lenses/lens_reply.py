"""Lenses over one input: the states behind layers, and the contributions of attentions and heads, as logits.

Notation: B texts, P positions that are read, H heads, d the width of the states, T targets.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attention_contract.base import valid
from attention_contract.schemas.analyses.lenses import (
    LayerLens,
    LensPart,
    LensReading,
    LensRest,
    LensTop,
    ModelLensReply,
)
from attention_service.core.tensors import to_numpy, wide
from attention_service.models.answers.lenses.lens_plan import LensPlan
from attention_service.models.answers.lenses.residual_stream import Branch, Unembedding
from attention_service.models.costs.answer_parts import OwnTime, Passes, at_once
from attention_service.models.inputs.prediction_head import rows_at
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_service.models.passes.attention_places import AttentionPlace, turns_of
from attention_service.models.passes.layer_states import LayerStates
from attention_service.models.passes.module_hooks import after, before, on_turn
from attention_transformers.model_layers import LayerKey


@dataclass
class _States:
    """The states of one run at the positions that are read, ``[B, P, …]``."""

    given: dict[nn.Module, Tensor] = field(default_factory=dict)
    """The state that each module was given."""
    made: dict[nn.Module, Tensor] = field(default_factory=dict)
    """The state that it returned."""


class LensRun:
    """One run that is read out."""

    def __init__(self, loaded: LoadedModel, plan: LensPlan) -> None:
        self._loaded, self._plan = loaded, plan
        self._stream, self._request = plan.stream, plan.request
        self._asking = AttentionPass(_edits(loaded, plan.checked))
        self._states, self._time = _States(), OwnTime()
        self._names: set[int] = {*plan.targets}
        self._targets = torch.tensor(plan.targets, dtype=torch.int64, device=loaded.model.device)
        self._parts: dict[LayerKey, tuple[Tensor, Tensor | None]] = {}
        """The states that each attention adds ``[B, P, d]``, and that each of its heads adds ``[B, H, P, d]``."""

    def reply(self) -> ModelLensReply:
        """Run the model and read its states."""
        return at_once(self.parts())

    @torch.no_grad()
    def parts(self) -> Passes[ModelLensReply]:
        """Yield between the parts of the reply: the pass, and the readings of some states each."""
        loaded, plan = self._loaded, self._plan
        arguments = plan.checked.inputs.arguments
        with LayerStates(loaded.all_places, self._asking).reading((), output=False, hidden=False), self._holding():
            loaded.run(arguments, self._asking, logits=torch.tensor([0]))
        layers = dict[int, LayerLens]()
        for number, place in enumerate(plan.checked.places):
            layers[number] = yield from self._layer(place)
        fields: dict[str, Any] = {"layers": [*layers.values()]}
        if plan.tells_rest:
            fields |= self._rest()
        several = plan.checked.inputs.several
        fields |= {
            "kind": self._request.kind,
            "lens": self._request.lens,
            "positions": plan.positions if several else plan.positions[0],
            "targets": plan.targets,
            "names": self._named(),
        }
        self._asking.started = self._time.began
        return valid(ModelLensReply, fields | run_fields(loaded, plan.checked, self._asking))

    def _named(self) -> dict[str, str]:
        ids = sorted(self._names)
        return dict(zip(map(str, ids), self._loaded.head.named(self._loaded.reader, ids), strict=True))

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Keep the states that are to be read, at their positions, until the block ends."""
        stream, plan, places = self._stream, self._plan, self._loaded.all_places
        given: list[nn.Module] = []
        made: list[nn.Module] = []
        if plan.by_part:
            given, made = [stream.layers[0]], [*stream.layers]
            if stream.unembedding is not None and stream.unembedding.module is not None:
                made.append(stream.unembedding.module)
            for place in [each for one in plan.checked.places for each in stream.beside(one)]:
                branch = stream.branches[place.key]
                given.append(place.layer)
                made.append(branch.source)
                if branch.norm is not None:
                    given.append(branch.source)
                if branch.projection is not None:
                    given.append(branch.projection)
        with ExitStack() as stack:
            for kept, modules, hook in ((self._states.given, given, before), (self._states.made, made, after)):
                for module in dict.fromkeys(modules):
                    stack.callback(hook(module, self._kept(kept, module)))
            self._hidden: dict[LayerKey, Tensor] = {}
            for place in plan.checked.places if "hidden" in plan.of else ():
                change = place.batch_first(self._kept(self._hidden, place.key))
                stack.callback(after(place.layer, on_turn({place.turn: change}, turns_of(place.layer, places))))
            yield

    def _kept(self, found: dict[Any, Tensor], key: Any) -> Callable[[Tensor], None]:
        def keep(state: Tensor) -> None:
            flat = rows_at(state.flatten(2), self._plan.positions)
            found[key] = flat.view(*flat.shape[:2], *state.shape[2:])

        return keep

    # ── readings ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _layer(self, place: AttentionPlace) -> Passes[LayerLens]:
        fields: dict[str, Any] = {"layer": place.key}
        for part in self._plan.of:
            reading = self._hidden_reading(place) if part == "hidden" else self._part_reading(place, part)
            fields[part] = yield from reading
        return valid(LayerLens, fields)

    def _hidden_reading(self, place: AttentionPlace) -> Passes[LensReading]:
        """The logits of the states behind a layer."""
        state = self._hidden.pop(place.key)
        if (matrix := self._jacobian(place)) is not None:
            state = (wide(state) @ matrix.T).to(state.dtype)
        return self._reading(state.flatten(0, 1), state.shape[:2], self._stream.readout.logits, shares=True)

    def _part_reading(self, place: AttentionPlace, part: LensPart) -> Passes[LensReading]:
        """The contributions of an attention, or of each of its heads, to the logits."""
        output, heads = self._parts_of(place)
        matrix, scale, state = self._jacobian(place), self._scale(place), output
        if part == "heads" and heads is not None:
            state, scale = heads, None if scale is None else scale[:, None]
        if matrix is not None:
            state = state @ matrix.T
        held = self._unembedding.held(state, scale)
        weight = self._unembedding.matrix

        def logits(rows: Tensor) -> Tensor:
            return wide(rows.to(weight.dtype) @ weight.T)

        return self._reading(held.flatten(0, -2), held.shape[:-1], logits, shares=False)

    def _reading(
        self, rows: Tensor, shape: torch.Size, logits: Callable[[Tensor], Tensor], *, shares: bool
    ) -> Passes[LensReading]:
        """The largest logits of states ``[N, …]``, and those of the targets; ``shape``: the dimensions that N has."""
        at_once, k = self._stream.readout.rows, min(self._request.top_k, self._loaded.reader.predictable)
        targets: list[Tensor] = []
        found: list[Sequence[Tensor]] = []
        for start in range(0, len(rows), at_once):
            yield from self._time.between(1)
            made = logits(rows[start : start + at_once])
            targets.append(made[:, self._targets])
            best = made.topk(k)
            share = [(best.values - made.logsumexp(-1, keepdim=True)).exp()] if shares else []
            found.append([best.indices, best.values, *share])
        fields: dict[str, Any] = {}
        if k:
            arrays = [torch.cat(each).view(*shape, k) for each in zip(*found, strict=True)]
            self._names.update(arrays[0].flatten().tolist())
            named = zip(("ids", "logits", "probabilities"), map(self._array, arrays), strict=False)
            fields["top"] = valid(LensTop, dict(named))
        if self._plan.targets:
            fields["targets"] = self._array(torch.cat(targets).view(*shape, -1))
        return valid(LensReading, fields)

    def _array(self, x: Tensor) -> Any:
        return to_numpy(x if self._plan.checked.inputs.several else x[0])

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _unembedding(self) -> Unembedding:
        found = self._stream.unembedding
        if found is None:
            raise TypeError("a stream without an unembedding has no parts")
        return found

    def _jacobian(self, place: AttentionPlace) -> Tensor | None:
        """The matrix of a layer; None for the identity."""
        if self._plan.file is None or place.layer is self._stream.last:
            return None
        model, matrix = self._loaded.model, self._plan.file.matrix(self._stream.number(place.layer))
        return matrix.to(model.device, torch.promote_types(model.dtype, torch.float32))

    def _scale(self, place: AttentionPlace | None = None) -> Tensor | None:
        """The scale ``[B, P, 1]`` of the final norm in the run; of a lens, in the reading of the layer's states."""
        module, norm = self._unembedding.module, self._unembedding.norm
        if module is None or norm is None:
            return None
        state, made = self._states.made[self._stream.last], self._states.made[module]
        if place is not None and (matrix := self._jacobian(place)) is not None:
            state = (wide(self._states.made[place.layer]) @ matrix.T).to(state.dtype)
            made = module(state)
        return norm.scale(wide(state), wide(made))

    def _parts_of(self, place: AttentionPlace) -> tuple[Tensor, Tensor | None]:
        """The states that an attention adds ``[B, P, d]``, and that each of its heads adds ``[B, H, P, d]``."""
        if place.key not in self._parts:
            branch = self._stream.branches[place.key]
            source, heads = wide(self._states.made[branch.source]), None
            if "heads" in self._plan.of and branch.projection is not None:
                heads = branch.factor * self._heads(place, branch, branch.projection)
            self._parts[place.key] = branch.factor * source, heads
        return self._parts[place.key]

    def _heads(self, place: AttentionPlace, branch: Branch, projection: nn.Module) -> Tensor:
        given, sizes = wide(self._states.given[projection]), (place.widths.heads, place.widths.value_dim)
        matrix = wide(self._matrix(projection)).view(*sizes, -1)
        heads = torch.einsum("bphv,hvd->bhpd", given.view(*given.shape[:2], *sizes), matrix)
        if branch.norm is None:
            return heads
        scale = branch.norm.scale(wide(self._states.given[branch.source]), wide(self._states.made[branch.source]))
        return branch.norm.held(heads, scale[:, None])

    def _matrix(self, projection: nn.Module) -> Tensor:
        """The matrix ``[in, out]`` of a projection, with what an adapter changes of it."""
        weight: Any = projection.weight
        if self._plan.checked.adapter is None:
            return weight if isinstance(projection, Conv1D) else weight.T  # type: ignore[no-any-return]
        width = weight.shape[0 if isinstance(projection, Conv1D) else 1]
        probes = torch.eye(width, dtype=weight.dtype, device=weight.device)[None]
        found: Tensor = projection(probes)[0] - projection(torch.zeros_like(probes[:, :1]))[0]
        return found

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _rest(self) -> dict[str, Any]:
        """The other parts of the logits of the targets, and these logits."""
        made, given, stream, unembedding = self._states.made, self._states.given, self._stream, self._unembedding
        weight, scale = wide(unembedding.matrix[self._targets]), self._scale()

        def logits(state: Tensor) -> Tensor:
            return unembedding.held(state, scale) @ weight.T

        first, last = wide(given[stream.layers[0]]), wide(made[stream.last])
        others, mlps, biases = last - first, [], []
        counted: set[nn.Module] = set()
        for place in self._plan.checked.places:
            output, heads = self._parts_of(place)
            beside = torch.zeros_like(output)
            if place.layer not in counted:
                counted.add(place.layer)
                beside = wide(made[place.layer]) - wide(given[place.layer])
                beside = beside - sum(self._parts_of(each)[0] for each in stream.beside(place))
            others = others - output - beside
            mlps.append(logits(beside))
            if heads is not None:
                biases.append(logits(output - heads.sum(1)))
        constant = unembedding.constant(self._targets)
        rest: dict[str, Any] = {
            "embeddings": self._array(logits(first)),
            "mlps": self._array(torch.stack(mlps, 1)),
            "others": self._array(logits(others)),
            "unembedding": to_numpy(constant),
        }
        if biases:
            rest["biases"] = self._array(torch.stack(biases, 1))
        return {"rest": valid(LensRest, rest), "logits": self._array(logits(last) + constant)}


def _edits(loaded: LoadedModel, checked: CheckedRequest) -> dict[LayerKey, LayerTask]:
    """The edits of the request as tasks of its pass."""
    places = {key: loaded.place_of(key) for key in checked.edits}
    return {
        place.key: LayerTask(edits=checked.edits[key], key_mask=checked.keys(place).mask)
        for key, place in places.items()
    }
