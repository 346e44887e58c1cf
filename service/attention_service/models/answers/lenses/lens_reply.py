"""Lenses over one input: the states behind layers, and the contributions of attentions and heads, as logits.

Notation: B texts, P positions that are read, H heads, d the width of the states, T targets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
from attention_service.models.costs.answer_parts import OwnTime, Passes, at_once
from attention_service.models.loaded.checked_request import edit_tasks
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.loaded.model_runner import Reading, RunSpec
from attention_service.models.loaded.streams.residual_stream import (
    ADDED,
    JOINED_HEADS,
    NORMED,
    UNNORMED,
    Branch,
    Unembedding,
)
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.points import Point
from attention_transformers.model_layers import LayerKey


class LensRun:
    """One run that is read out."""

    def __init__(self, loaded: LoadedModel, plan: LensPlan) -> None:
        self._loaded, self._plan = loaded, plan
        self._stream, self._request = plan.stream, plan.request
        self._attention_pass = AttentionPass(edit_tasks(loaded, plan.checked))
        self._at, self._time = dict[Point, Tensor](), OwnTime()
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
        spec = RunSpec(self._attention_pass, dict.fromkeys(self._points, Reading(plan.positions)))
        self._at = {**loaded.runner.run(arguments, spec).at}
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
        self._attention_pass.started = self._time.began
        return valid(ModelLensReply, fields | run_fields(loaded, plan.checked, self._attention_pass))

    def _named(self) -> dict[str, str]:
        ids = sorted(self._names)
        return dict(zip(map(str, ids), self._loaded.head.named(self._loaded.reader, ids), strict=True))

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _points(self) -> list[Point]:
        """The points that are read."""
        stream, plan = self._stream, self._plan
        points: list[Point] = [(place.key, "hidden") for place in plan.checked.places if "hidden" in plan.of]
        if not plan.by_part:
            return points
        points += stream.states
        if stream.unembedding is not None and stream.unembedding.module is not None:
            points.append(NORMED)
        for place in [neighbour for one in plan.checked.places for neighbour in stream.beside(one)]:
            branch = stream.branches[place.key]
            parts = {ADDED: True, UNNORMED: branch.norm is not None, JOINED_HEADS: branch.projection is not None}
            points += [(place.key, name) for name, is_there in parts.items() if is_there]
        return points

    # ── readings ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _layer(self, place: AttentionPlace) -> Passes[LayerLens]:
        fields: dict[str, Any] = {"layer": place.key}
        for part in self._plan.of:
            reading = self._hidden_reading(place) if part == "hidden" else self._part_reading(place, part)
            fields[part] = yield from reading
        return valid(LayerLens, fields)

    def _hidden_reading(self, place: AttentionPlace) -> Passes[LensReading]:
        """The logits of the states behind a layer."""
        state = self._at.pop((place.key, "hidden"))
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
        readings: list[Sequence[Tensor]] = []
        for start in range(0, len(rows), at_once):
            yield from self._time.between(1)
            made = logits(rows[start : start + at_once])
            targets.append(made[:, self._targets])
            best = made.topk(k)
            share = [(best.values - made.logsumexp(-1, keepdim=True)).exp()] if shares else []
            readings.append([best.indices, best.values, *share])
        fields: dict[str, Any] = {}
        if k:
            arrays = [torch.cat(parts).view(*shape, k) for parts in zip(*readings, strict=True)]
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
        unembedding = self._stream.unembedding
        if unembedding is None:
            raise TypeError("a stream without an unembedding has no parts")
        return unembedding

    def _jacobian(self, place: AttentionPlace) -> Tensor | None:
        """The matrix of a layer; None for the identity."""
        number = self._stream.number(place)
        if self._plan.file is None or number == self._stream.count - 1:
            return None
        model, matrix = self._loaded.model, self._plan.file.matrix(number)
        return matrix.to(model.device, torch.promote_types(model.dtype, torch.float32))

    def _scale(self, place: AttentionPlace | None = None) -> Tensor | None:
        """The scale ``[B, P, 1]`` of the final norm in the run; of a lens, in the reading of the layer's states."""
        state, made = self._at[self._stream.states[-1]], self._at.get(NORMED)
        if place is not None and (matrix := self._jacobian(place)) is not None:
            state, made = (
                (wide(self._at[self._stream.states[self._stream.number(place) + 1]]) @ matrix.T).to(state.dtype),
                None,
            )
        return self._unembedding.scale(state, made)

    def _parts_of(self, place: AttentionPlace) -> tuple[Tensor, Tensor | None]:
        """The states that an attention adds ``[B, P, d]``, and that each of its heads adds ``[B, H, P, d]``."""
        if place.key not in self._parts:
            branch = self._stream.branches[place.key]
            source, heads = wide(self._at[place.key, ADDED]), None
            if "heads" in self._plan.of and branch.projection is not None:
                heads = branch.factor * self._heads(place, branch)
            self._parts[place.key] = branch.factor * source, heads
        return self._parts[place.key]

    def _heads(self, place: AttentionPlace, branch: Branch) -> Tensor:
        given, sizes = wide(self._at[place.key, JOINED_HEADS]), (place.widths.heads, place.widths.value_dim)
        matrix = wide(branch.matrix(is_adapted=self._plan.checked.adapter is not None)).view(*sizes, -1)
        heads = torch.einsum("bphv,hvd->bhpd", given.view(*given.shape[:2], *sizes), matrix)
        if branch.norm is None:
            return heads
        scale = branch.norm.scale(wide(self._at[place.key, UNNORMED]), wide(self._at[place.key, ADDED]))
        return branch.norm.held(heads, scale[:, None])

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _rest(self) -> dict[str, Any]:
        """The other parts of the logits of the targets, and these logits."""
        stream, unembedding = self._stream, self._unembedding
        weight, scale = wide(unembedding.matrix[self._targets]), self._scale()

        def logits(state: Tensor) -> Tensor:
            return unembedding.held(state, scale) @ weight.T

        states = [self._at[point] for point in stream.states]
        first, last = wide(states[0]), wide(states[-1])
        others, mlps, biases = last - first, [], []
        counted: set[int] = set()
        for place in self._plan.checked.places:
            output, heads = self._parts_of(place)
            beside = torch.zeros_like(output)
            if (number := stream.number(place)) not in counted:
                counted.add(number)
                beside = wide(states[number + 1]) - wide(states[number])
                beside = beside - sum(self._parts_of(neighbour)[0] for neighbour in stream.beside(place))
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
