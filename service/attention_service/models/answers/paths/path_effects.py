"""Effects of paths on a prediction: the end of each reads what its beginning sends otherwise, and the run follows.

A change Δ of what a component sends goes through the residual stream alone: all components but the end of the path have
their outputs of the baseline. So a head's queries, keys or values are those that its layer makes of its states plus Δ,
an MLP's output is that for its input plus Δ, and the last states are those of the baseline plus Δ. From there on the
model runs as it does. Source: Wang et al. 2022, Interpretability in the wild, appendix B; Goldowsky-Dill et al. 2023.

Notation: B texts, N paths of one pass, S their different beginnings, L tokens, H heads, d the width of the states.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply, ModelEffectsRequest
from attention_contract.schemas.analyses.model_paths import PathSenders
from attention_contract.schemas.prompts import ModelInput
from attention_service.core.tensors import wide
from attention_service.models.answers.measured_runs import MeasuredRuns, in_passes
from attention_service.models.answers.paths.path_cost import sizes_of_paths
from attention_service.models.answers.paths.path_ends import Component, path_ends
from attention_service.models.answers.paths.path_models import check_paths_known
from attention_service.models.answers.paths.sent_states import SentChanges, SentStates, points_sent, sent_states
from attention_service.models.costs.answer_parts import Passes
from attention_service.models.costs.pass_memory import SweepSizes
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.inputs.input_stacks import Inputs
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_runner import RunSpec
from attention_service.models.loaded.streams.residual_stream import ADDED, ResidualStream
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.points import Point
from attention_service.models.passes.shared_layers import Resumed


class EffectsOfPaths:
    """The effects of the paths that one request asks for."""

    def __init__(self, loaded: LoadedModel, request: ModelEffectsRequest, stream: ResidualStream) -> None:
        """Check the request. Raises InvalidRequest that names the field at fault."""
        if request.from_ is None:
            raise InvalidRequest.at("from", "expected the beginnings of paths")
        self._loaded, self._stream, self.runs = loaded, stream, MeasuredRuns(loaded, request)
        checked = self.runs.checked
        if not checked.repeats:
            raise InvalidRequest.at("from", "paths are measured over texts alone; leave images and sounds out")
        self.ends = path_ends(loaded, request.from_, request.receivers, checked.places)
        """The components at the beginnings and the ends."""
        check_paths_known(loaded, stream, self.ends)
        senders = request.from_
        self._reference = _reference(loaded, request, senders, checked.inputs)
        self._sends: float | Literal["mean"] = 0.0 if senders.set is None else senders.set
        self._held = {
            receiver.layer: receiver.attention for receiver in self.ends.receivers if receiver.end.part == "mlps"
        }
        """The attentions of the layers that are ends, by their place in the stack."""

    @property
    def sizes(self) -> SweepSizes:
        """The sizes of the texts, and of what is kept of them."""
        return sizes_of_paths(self._loaded, self.ends, self.runs.sizes, self._texts)

    @property
    def _texts(self) -> int:
        """The runs whose states are kept."""
        return 1 if self._reference is None else 2

    @property
    def copies(self) -> int:
        """The most copies of the texts in one pass."""
        return max(1, len(self.ends.paths))

    @torch.no_grad()
    def parts(self, copies: int) -> Passes[ModelEffectsReply]:
        """Measure the baseline, and then the paths, on at most so many copies of the texts in a pass."""
        changes = yield from self.changes()

        def kind(path: int) -> tuple[int, str]:
            _, receiver = self.ends.of(path)
            return receiver.layer, receiver.end.part

        for paths in in_passes(self.ends.paths, kind, copies):
            yield from self.runs.time.between(2 * len(paths))  # queries, keys and values take two passes
            self._measure(paths, changes)
        return self.runs.reply({
            "from": [sender.end for sender in self.ends.senders],
            "to": [receiver.end for receiver in self.ends.receivers],
        })  # fmt: skip

    # ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def changes(self) -> Passes[SentChanges]:
        """Run the texts, and then that whose states are sent. Returns the changes of what the beginnings send."""
        stream, senders = self._stream, self.ends.senders
        read = points_sent(stream, senders, [*self._held.values()])
        clean = sent_states(stream, senders, self.runs.measure_baseline(RunSpec(), read).at)
        other: SentStates | float | Literal["mean"] = self._sends
        if self._reference is not None:
            yield from self.runs.time.between(2)
            spec = RunSpec(read=points_sent(stream, senders, ()))
            other = sent_states(stream, senders, self._loaded.runner.run(self._reference.arguments, spec).at)
        return SentChanges(stream, clean, other, self.runs.checked.inputs.predicted.mask)

    def _measure(self, paths: Sequence[int], changes: SentChanges) -> None:
        """Try these paths, each on its own copy of the texts."""
        ends = [self.ends.of(path) for path in paths]
        receiver = ends[0][1]
        senders = [*dict.fromkeys(sender for sender, _ in ends)]
        sent = {sender: changes.of(sender) for sender in senders}
        count, kept = self._loaded.shared_layers.count, self.runs.kept
        if receiver.place is None:
            states = self._states([wide(kept.last) + sent[end_pair] for end_pair, _ in ends])
            self.runs.measure(paths, RunSpec(), count, states)
        elif receiver.end.part == "mlps":
            spec, states = self._in_mlp(receiver, [sender for sender, _ in ends], sent, changes.clean)
            self.runs.measure(paths, spec, receiver.layer, states)
        else:
            put = self._received(receiver.place, receiver, ends, sent)
            tasks = {receiver.place.key: LayerTask(key_mask=self._key_mask(receiver.place, len(ends)))}
            self.runs.measure(paths, RunSpec(AttentionPass(tasks), put=put), receiver.layer)

    def _received(
        self, place: AttentionPlace, receiver: Component, ends: Sequence[tuple[Component, Component]],
        sent: dict[Component, Tensor],
    ) -> dict[Point, Tensor]:  # fmt: skip
        """The queries, keys or values of each path's end that follow from what its beginning sends."""
        loaded, point, first = self._loaded, (place.key, receiver.end.part), receiver.layer
        kept, many = self.runs.kept, 1 + len(sent)
        state = wide(kept.before[first])
        states = self._states([state, *(state + change for change in sent.values())])
        tasks = {place.key: LayerTask(key_mask=self._key_mask(place, many))}
        resumed = Resumed(kept, first, many, states=states, end=first + 1)
        spec = RunSpec(AttentionPass(tasks), keep=[point], resumed=resumed)
        run = loaded.runner.run(self.runs.arguments(many), spec)
        received = run.attention_pass.of_all_heads(place.key, run.at[point].detach())
        clean, *parts = received.chunk(many)  # [B, H, L, D]
        changed = dict(zip(sent, parts, strict=True))
        rows = clean.repeat(len(ends), 1, 1, 1).view(len(ends), *clean.shape)
        for row, (sender, end) in zip(rows, ends, strict=True):
            row[:, end.end.head] = changed[sender][:, end.end.head]
        return {point: rows.flatten(0, 1)}

    def _in_mlp(
        self, receiver: Component, senders: Sequence[Component], sent: dict[Component, Tensor], clean: SentStates
    ) -> tuple[RunSpec, Tensor]:
        """Let a layer add what follows from a changed input beside its attention, and pass all else on as it is.

        Returns the states ``[N · B, L, d]`` to begin with too. With attention's output held, a layer makes
        x + Δ + a + mlp(x + Δ + a) of x + Δ; Δ is taken away again. A head of the layer itself sends its Δ by way of a.
        """
        place = receiver.attention
        branch, state = self._stream.branches[place.key], wide(self.runs.kept.before[receiver.layer])
        attention, none = wide(clean.attentions[place.key]), torch.zeros_like(state)
        before = [none if sender.layer == receiver.layer else sent[sender] for sender in senders]
        inside = [sent[sender] if sender.layer == receiver.layer else none for sender in senders]
        held = self._states([attention + change / branch.factor for change in inside])
        changes = torch.cat([sent[sender] for sender in senders])
        spec = RunSpec(put={(place.key, ADDED): held}, add={(place.key, "hidden"): -changes})
        return spec, self._states([state + change for change in before])

    def _states(self, copies: Sequence[Tensor]) -> Tensor:
        """``[copies · B, L, d]`` in the dtype of the model."""
        return torch.cat([*copies]).to(self.runs.kept.before[0].dtype)

    def _key_mask(self, place: AttentionPlace, copies: int) -> Tensor | None:
        mask = self.runs.checked.keys(place).mask
        return None if mask is None else mask.repeat(copies, 1)


def _reference(
    loaded: LoadedModel, request: ModelEffectsRequest, senders: PathSenders, inputs: Inputs
) -> Inputs | None:
    """The text whose states are sent, with a token for each of the input. Raises InvalidRequest."""
    if senders.text is None and senders.tokens is None:
        return None
    param = "from.text" if senders.text is not None else "from.tokens"
    answer = request.answer if senders.text is not None else None
    with fields_named(text="from.text", tokens="from.tokens"):
        reference = loaded.reader.read(ModelInput(text=senders.text, tokens=senders.tokens, answer=answer))
    own, other = inputs.predicted, reference.predicted
    real = [stack.ids >= 0 if stack.mask is None else stack.mask for stack in (own, other)]
    many = len(own.ids) if len(other.ids) == 1 else 1
    if real[0].shape != (len(other.ids) * many, other.length) or not bool((real[0] == real[1]).all()):
        lengths = [row.sum(1).tolist() for row in real]
        raise InvalidRequest.at(
            param,
            f"expected as many tokens as the input has, {lengths[0]}, so that each has a counterpart; got {lengths[1]}",
            expected=lengths[0],
            actual=lengths[1],
        )
    return reference
