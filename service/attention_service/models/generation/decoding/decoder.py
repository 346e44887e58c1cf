"""The passes that give running texts their next tokens: shared by those that can, alone for each other one."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from attention_service.core.cancellation import Cancellation, cancellable
from attention_service.core.tensors import wide
from attention_service.models.generation.decoding.decode_attention import DecodeAttention, Decoding
from attention_service.models.generation.decoding.joined_group import ALONE, JoinedGroup, Joining, try_joining
from attention_service.models.generation.decoding.joined_prompts import alike_in_length, read_together, reads_together
from attention_service.models.generation.decoding.logit_processors import no_finite_logits
from attention_service.models.generation.decoding.observed_decoding import ObservedDecoding
from attention_service.models.generation.decoding.read_texts import ReadTexts
from attention_service.models.generation.decoding.reading_on import ReadingOn, try_reading_on
from attention_service.models.generation.decoding.running_text import RunningText, reports_of
from attention_service.models.generation.decoding.token_attention import PassWeights
from attention_service.models.generation.decoding.watched_states import scoring
from attention_service.models.loaded.adapters import Adapter
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.layer_attention import LayerAttention
from attention_service.models.passes.observed.observed_attention import ObservedAttention

_NOT_WATCHED: Final[AbstractContextManager[None]] = nullcontext()
PART: Final = 512
"""Tokens of a prompt that are read in one pass, if its past can be read in parts."""
_ONE_BY_ONE: Final = 8
"""The price of a token of a prompt that is read in a pass of its own, beside that of one of many in a pass."""


class Step(NamedTuple):
    """The result of one pass for a text, or the fault that it has instead."""

    text: RunningText
    logits: Tensor | None = None
    """``[1, V]`` in float32 or float64, before anything changes them."""
    token: int = 0
    layers: list[dict[str, Any]] | None = None
    """The report on the attention that chose the token."""
    joined: int = 1
    """The number of requests that shared the pass."""
    fault: Exception | None = None


def decoding_of(loaded: LoadedModel) -> Decoding:
    """The attention of a model in the passes that generate."""
    attention = loaded.attention
    if isinstance(attention, ObservedAttention):
        return ObservedDecoding(loaded, attention)
    if isinstance(attention, LayerAttention):
        return DecodeAttention(loaded, attention)
    raise TypeError(f"{attention.way} attention does not generate")


class Decoder:
    """Runs the passes of a model's running texts."""

    def __init__(self, loaded: LoadedModel, kept_bytes: int = 0) -> None:
        """``kept_bytes``: memory for what was read of texts that have ended."""
        self.loaded, self.model = loaded, loaded.model
        self._read = ReadTexts(kept_bytes)
        self.attention = decoding_of(loaded)
        self.states = loaded.states
        self._joining: Joining | None = None
        self._reading: ReadingOn | None = None
        self._groups: dict[tuple[int, Adapter | None], JoinedGroup] = {}
        """The texts that share passes: all under 0, or those of one length by it, less the turns.

        Those with an adapter whose rows cannot be told apart are under that adapter.
        """
        self._turns = 0

    def close(self) -> None:
        """Forget the attention function; the model attends by its own again."""
        self.attention.close()

    @property
    def joining(self) -> Joining:
        """The texts that share passes, by a trial before the first that could."""
        if self._joining is None:
            with torch.inference_mode(), cancellable(Cancellation()):  # for those who come later, whoever leaves
                self._joining = try_joining(self.loaded, self.attention)
            self.states.take()
        return self._joining

    @property
    def reading(self) -> ReadingOn:
        """The passes that read on from a past, by a trial before the first."""
        if self._reading is None:
            with torch.inference_mode(), cancellable(Cancellation()):
                self._reading = try_reading_on(self.loaded, self.attention)
        return self._reading

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def recall(self, text: RunningText, reader: str) -> int:
        """Take over what was read before of a prompt's beginning. Returns the number of these tokens."""
        if not self._read.bytes or self._is_stretched(text) or not self._read.can_take(text, len(text.ids) - 1):
            return 0
        if self.reading.reason is not None:
            return 0
        price, left = 1 if self.reading.in_parts else _ONE_BY_ONE, 1 if self.reading.by_steps else 2
        with torch.inference_mode():
            return self._read.read(reader, text, price, left)

    def read(self, text: RunningText) -> Step | None:
        """Read the next part of a prompt. Returns the first step after the last part. Raises what the step does."""
        part = range(text.seen, len(text.ids))
        if text.seen or (len(part) > PART and text.reads_tokens_alone and not self._is_stretched(text)):
            part = self.reading.part_of(text, PART)
        whole = len(part) == len(text.ids)
        with torch.inference_mode(), self._alone(text, prompt=True) as weights:
            output = self.model(**text.prompt_inputs(part, whole=whole), return_dict=True)
            if part.stop < len(text.ids):
                text.take_past(output)
                text.seen = part.stop
                return None
            return self._stepped(text, output, weights)

    def read_some(self, texts: Sequence[RunningText]) -> tuple[list[Step], int]:
        """Read prompts of the first text, and of those that can be read with it, up to ``PART`` tokens.

        Returns their first steps, none of a prompt of which a part is left, and the number of tokens that were read.
        """
        first, shared = texts[0], [texts[0]]
        if len(texts) > 1 and self._can_be_mate(first):
            mates = [text for text in texts[1:] if self._can_be_mate(text) and _apart(text) is _apart(first)]
            shared = alike_in_length([first, *mates], PART)
        if len(shared) > 1:
            try:
                adapted = self.loaded.adapters.of_rows([text.adapter for text in shared])
                with torch.inference_mode(), adapted:
                    logits, reports = read_together(self.model, self.attention, self.loaded.points, shared)
            except Exception:
                shared = [first]
            else:
                requests = len({text.request for text in shared})
                steps = [
                    self._chosen(text, row, None if text.look is None else reports[text.look], requests)
                    for text, row in zip(shared, logits, strict=True)
                ]
                return steps, sum(len(text.ids) for text in shared)
        before = first.seen
        try:
            step = self.read(first)
        except Exception as fault:
            return [Step(first, fault=fault)], len(first.ids)
        return [] if step is None else [step], max(first.seen - before, 1)

    def _can_be_mate(self, text: RunningText) -> bool:
        shares = reads_together(text) and not self._is_stretched(text) and self.joining.alike
        return shares and self.reading.in_parts

    def _is_stretched(self, text: RunningText) -> bool:
        """True if the rotation of its tokens depends on its length, which those of others share no pass with."""
        limit = self.loaded.attention.rotations.limit
        return limit is not None and len(text.ids) > limit

    @contextmanager
    def _alone(self, text: RunningText, *, prompt: bool = False) -> Iterator[PassWeights]:
        """Let a pass be over one text; ``prompt``: over a part of its prompt."""
        self.states.give(text.held)
        try:
            watching = _NOT_WATCHED
            if text.watch is not None:
                watching = scoring([text.watch], self.loaded.points, prompt=prompt)
            with self.loaded.adapters.using(text.adapter), self.attention.running([text]) as weights, watching:
                yield weights
        finally:
            self.states.learn()
            text.held = self.states.take()

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, texts: Sequence[RunningText]) -> list[Step]:
        """Give each text its next token. A text that cannot have one has its fault in its place."""
        shared, alone = self._divided(texts)
        steps: list[Step] = []
        with torch.inference_mode():
            for group in shared:
                steps += self._joined_step(group)
            for text in alone:
                steps.append(self._single(text))
        self._turns += 1
        return steps

    def keep_prompt(self, text: RunningText, reader: str) -> None:
        """Keep what was read of a text's prompt for those of ``reader``, if nothing is kept once it has ended."""
        if self._can_keep(text) and not self._keeps_answer(text):
            with torch.inference_mode():
                self._read.keep(reader, text, ended=False)

    def _can_keep(self, text: RunningText) -> bool:
        """True if the past of a text as it is may serve other prompts."""
        able = self._read.can_take(text, text.seen) and not self._is_stretched(text)
        return able and text.fault is None and self.reading.reason is None

    def _keeps_answer(self, text: RunningText) -> bool:
        """True if the past of a text has its answer as a prompt with it has: the next turn reads it without edits."""
        return self.reading.by_steps and not text.edits.begin_later

    def drop(self, text: RunningText, reader: str | None = None) -> None:
        """Forget a text that has ended; what it has read is kept for the prompts of ``reader``, if one is named."""
        keeps = reader is not None and self._can_keep(text) and self._keeps_answer(text)
        for key, group in list(self._groups.items()):
            with torch.inference_mode():
                group.remove(text, give_back=keeps)
            if not group.texts:
                del self._groups[key]
        if reader is not None and keeps and text.fault is None:
            with torch.inference_mode():
                self._read.keep(reader, text, ended=True)

    def _divided(self, texts: Sequence[RunningText]) -> tuple[list[JoinedGroup], list[RunningText]]:
        """The texts that share a pass, and those that have one of their own."""
        together: dict[tuple[int, Adapter | None], list[RunningText]] = {}
        alone: list[RunningText] = []
        able: list[RunningText] = []
        for text in texts:
            (alone if text.alone else able).append(text)
        joining = self.joining if len(able) > 1 else ALONE
        for text in able:
            if (joining.unlike or joining.alike) and not self._is_stretched(text) and joining.takes(text):
                length = 0 if joining.unlike else text.seen - self._turns
                together.setdefault((length, _apart(text)), []).append(text)
            else:
                alone.append(text)
        shared = []
        for key in dict.fromkeys([*self._groups, *together]):  # in one order in every process of a spread model
            wanted = together.get(key, [])
            group = self._groups.get(key)
            if len(wanted) < 2:
                alone += wanted
                if group is not None:
                    group.dissolve()
                    del self._groups[key]
                continue
            if group is None:
                group = self._groups[key] = JoinedGroup(self.model, joining)
            alone += group.hold(wanted)
            if group.texts:
                shared.append(group)
        return shared, alone

    def _single(self, text: RunningText) -> Step:
        if text.fault is not None:
            return Step(text, fault=text.fault)
        try:
            with self._alone(text) as weights:
                inputs = text.step_inputs()
                if (ids := inputs.get("input_ids")) is not None:  # all of them, where no past is kept
                    text.seen = len(text.ids) - ids.shape[1]
                output = self.model(**inputs, return_dict=True)
                return self._stepped(text, output, weights)
        except Exception as fault:
            return Step(text, fault=fault)

    def _joined_step(self, group: JoinedGroup) -> list[Step]:
        """One pass for all; if it fails, one for each, so that no text has the fault of another."""
        texts = group.texts
        try:
            adapted = self.loaded.adapters.of_rows([text.adapter for text in texts])
            watching = scoring([text.watch for text in texts], self.loaded.points)
            with adapted, self.attention.running(texts, group.past) as weights:
                with watching:
                    logits = group.run()
                layers = reports_of(texts, weights)
        except Exception:
            group.dissolve()
            self._groups = {key: kept_group for key, kept_group in self._groups.items() if kept_group is not group}
            return [self._single(text) for text in texts]
        group.end()
        for text in texts:
            if text.heard is not None:
                text.heard.end_pass()
        requests = len({text.request for text in texts})
        largest, greedy = (x.tolist() for x in logits.max(-1)) if any(text.is_greedy for text in texts) else ([], [])
        steps = []
        for row, text in enumerate(texts):
            own = None if text.look is None else layers[text.look]
            if text.is_greedy and not math.isfinite(largest[row]):
                steps.append(Step(text, fault=no_finite_logits()))
            elif text.is_greedy:
                steps.append(Step(text, logits[row : row + 1], greedy[row], own, requests))
            else:
                steps.append(self._chosen(text, logits[row : row + 1], own, requests))
        return steps

    def _stepped(self, text: RunningText, output: Any, weights: PassWeights) -> Step:
        """The step of a text that had a pass of its own over the last of its tokens. Raises what a processor does."""
        text.advance(output)
        if text.heard is not None:
            text.heard.end_pass(output.logits)
        reports = reports_of([text], weights) if text.looks else {}
        layers = None if text.look is None else reports[text.look]
        text.seen = len(text.ids)
        logits = wide(output.logits[:, -1], copy=True)
        return Step(text, logits, text.choose(logits), layers)

    def _chosen(self, text: RunningText, logits: Tensor, layers: Any, joined: int = 1) -> Step:
        try:
            return Step(text, logits, text.choose(logits), layers, joined)
        except Exception as fault:  # of its processors
            return Step(text, fault=fault)


def _apart(text: RunningText) -> Adapter | None:
    """The adapter of a text, if passes that it shares are with texts of the same adapter alone."""
    return None if text.adapter is None or text.adapter.mixes else text.adapter
