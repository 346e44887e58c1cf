"""One text that grows token by token: its tokens, its past, and all by which its next token is chosen."""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from attention_contract.errors import InvalidCheckpoint
from attention_service.models.generation.decoding.generated_text import GeneratedText
from attention_service.models.generation.decoding.heard_frames import HeardFrames
from attention_service.models.generation.decoding.logit_processors import no_finite_logits
from attention_service.models.generation.decoding.pasts.copied_pasts import copied
from attention_service.models.generation.decoding.pasts.text_pasts import unjoinable
from attention_service.models.generation.decoding.row_edits import RowEdits
from attention_service.models.generation.decoding.token_attention import PassWeights, TokenAttention
from attention_service.models.generation.decoding.watched_states import TextWatch
from attention_service.models.loaded.adapters import Adapter
from attention_service.models.passes.module_states import Held

_PASTS: Final = "past_key_values", "cache_params", "state"
"""The arguments in which models keep a past: keys and values, or running states."""

Reports = Mapping[TokenAttention, list[dict[str, Any]]]
"""The fields of the schema ``TokensAttention`` of each layer, by report."""


class Sharing(NamedTuple):
    """The passes over the tokens of a text, as they are joined with those of others."""

    reason: str | None
    """Why they cannot be joined; None if they can."""
    constants: Mapping[str, Any] = MappingProxyType({})
    """The arguments that are the same for each pass and text."""
    offset: Tensor | None = None
    """The position of a token less the tokens before it, ``[…, 1, 1]``; None if passes take no positions."""
    encoded: Any = None
    """The output of its encoder in transformers; its keys and values are in the past."""
    hides: bool = False
    """True if a mask names tokens of the encoder as padding."""


class BegunText(NamedTuple):
    """A text as transformers prepares it for its first pass."""

    ids: list[int]
    """Its tokens; of an encoder-decoder, whose encoder has run, those of the decoder."""
    state: dict[str, Any]
    processors: LogitsProcessorList
    draws: bool


class _Begun(Exception):
    """Leaves ``generate`` before its first pass."""


def begin_text(
    model: Any, ids: Sequence[int] | None, settings: Mapping[str, Any], arguments: Mapping[str, Tensor]
) -> BegunText:
    """Have ``generate`` prepare a text, and stop before its first pass.

    ``ids``: None for a text that is written down from a sound, among the ``arguments`` of the model besides the tokens.
    ``settings``: arguments of ``generate``. Raises what ``generate`` does for settings that it refuses.
    """
    begun: list[BegunText] = []

    def stop(
        _: Any, input_ids: Tensor, *, logits_processor: LogitsProcessorList, stopping_criteria: Any,
        generation_config: Any, synced_gpus: bool = False, streamer: Any = None, **state: Any,
    ) -> Tensor:  # fmt: skip
        drawn = bool(generation_config.do_sample)
        begun.append(BegunText(input_ids[0].tolist(), state, logits_processor, drawn))
        raise _Begun

    tokens = {}
    if ids is not None:
        prompt = torch.tensor([list(ids)], device=model.device)
        # A model with a ``generate`` of its own, such as SeamlessM4T, calls the tokens of a text by their own name.
        name = "input_ids" if "input_ids" in inspect.signature(model.generate).parameters else "inputs"
        tokens = {name: prompt, "attention_mask": torch.ones_like(prompt)}
    with suppress(_Begun):
        model.generate(**tokens, custom_generate=stop, **settings, **arguments)
    return begun[0]


@dataclass(eq=False)
class RunningText:
    """One choice of a generation."""

    choice: int
    model: Any
    ids: list[int]
    """All its tokens; of an encoder-decoder, those of the decoder."""
    state: dict[str, Any]
    """The arguments of its next pass besides the tokens, as transformers keeps them; its past among them."""
    processors: LogitsProcessorList
    draws: bool
    text: GeneratedText
    edits: RowEdits
    look: TokenAttention | None
    alone: bool
    """True if it shares no pass."""
    request: int
    """A number of the request that it belongs to."""
    adapter: Adapter | None = None
    """The adapter of its passes; None for the base."""
    heard: HeardFrames | None = None
    """The frames of the sound that it is written down from."""
    watch: TextWatch | None = None
    """The probes that score its tokens."""
    generator: torch.Generator | None = None
    prompt: int = 0
    """The tokens of its prompt; of an encoder-decoder, those of the encoder."""
    seen: int = 0
    """Its tokens of the passes before."""
    steps: int = 0
    """Its generated tokens."""
    held: Held = ()
    """The states of it that modules of the model keep between its passes."""
    fault: Exception | None = None
    """Why it cannot go on."""
    _joined: int = 0
    """Tokens read by joint passes since ``state`` was last updated."""

    @cached_property
    def looks(self) -> list[TokenAttention]:
        """The reports on the attention of its tokens: that of its reply, and those that probes of heads read."""
        watched = [] if self.watch is None else [look for _, look in self.watch.looks]
        return watched if self.look is None else [self.look, *watched]

    # ── alone ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def tensor(self) -> Tensor:
        """Its tokens ``[1, T]``."""
        return torch.tensor([self.ids], device=self.model.device)

    def prompt_inputs(self, part: range, *, whole: bool) -> dict[str, Any]:
        """The arguments of a pass over a part of the prompt; ``whole``: it is all of it."""
        state, ids = self.state, self.tensor
        if not whole:
            ids = ids[:, part.start : part.stop]
            state = dict(state)
            if (positions := state.get("position_ids")) is not None:
                state["position_ids"] = positions[..., part.start : part.stop]
            if (mask := state.get("attention_mask")) is not None:  # of the tokens before too
                state["attention_mask"] = mask[..., : part.stop]
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(ids, is_first_iteration=True, **state)
        return inputs

    def step_inputs(self) -> dict[str, Any]:
        """The arguments of a pass over its last token."""
        if self._joined:
            self.advance({}, self._joined)
            self._joined = 0
        after = 1 if self.state.get("use_cache") else None
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            self.tensor, next_sequence_length=after, **self.state
        )
        return inputs

    def advance(self, output: Any, tokens: int = 1) -> None:
        """Take over the past of a pass, and count its tokens."""
        self.state = self.model._update_model_kwargs_for_generation(
            output, self.state, is_encoder_decoder=self.model.config.is_encoder_decoder, num_new_tokens=tokens
        )

    def take_past(self, output: Any) -> None:
        """Take over the past of a pass over a part of its prompt."""
        self.state |= {name: past for name in _PASTS if (past := output.get(name)) is not None}

    def fork(self, choice: int, text: GeneratedText, look: TokenAttention | None) -> "RunningText":
        """Return another choice of the same prompt, which has been read."""
        own = {name: copied(value, torch.clone) for name, value in self.state.items() if name in _PASTS}
        return RunningText(
            choice, self.model, list(self.ids), self.state | own, copy.deepcopy(self.processors), self.draws, text,
            self.edits, look, self.alone, self.request, self.adapter, prompt=self.prompt, seen=self.seen,
            held=copied(self.held, torch.clone), watch=None if self.watch is None else self.watch.fork(),
        )  # fmt: skip

    # ── joined with others ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def past_name(self) -> str:
        """The argument of the model that has its past."""
        return next((name for name in _PASTS if name in self.state), _PASTS[0])

    @property
    def past(self) -> Any:
        """Its past; None if there is none yet."""
        return self.state.get(self.past_name)

    @cached_property
    def sharing(self) -> Sharing:
        """Ways to share decode passes with other texts; constant after the prompt."""
        if (reason := unjoinable(self.past)) is not None:
            return Sharing(reason)
        try:
            made = self.step_inputs()
        except Exception as fault:  # it has the fault in a pass of its own, and nobody else
            return Sharing(f"its passes cannot be prepared: {type(fault).__name__}")
        before = "decoder_" if self.model.config.is_encoder_decoder else ""
        positions, mask = made.pop(f"{before}position_ids", None), made.pop(f"{before}attention_mask", None)
        hidden, encoded = None, None
        if before:
            hidden, encoded = made.pop("attention_mask", None), made.pop("encoder_outputs", None)
            mask = None if mask is None or bool(mask.all()) else mask
        others = {name: value for name, value in made.items() if name not in {f"{before}input_ids", self.past_name}}
        named = sorted(name for name, value in others.items() if not isinstance(value, bool | int | float | str | None))
        named += [] if mask is None else [f"{before}attention_mask"]
        if named:
            return Sharing(f"its passes take {', '.join(named)}")
        if before and positions is None and "decoder_position_ids" in inspect.signature(self.model.forward).parameters:
            positions = torch.full((1, 1), self.seen, device=self.model.device)  # as it counts them itself
        return Sharing(
            None, others, None if positions is None else positions - self.seen, encoded,
            hides=hidden is not None and not bool(hidden.all()),
        )  # fmt: skip

    @property
    def reads_tokens_alone(self) -> bool:
        """True if the passes over its prompt take no more than tokens and positions, so that they may be divided."""
        tensors = {name: x for name, x in self.state.items() if isinstance(x, Tensor) and name != "position_ids"}
        encoded = any(value for name, value in self.state.items() if name.endswith("encoder_outputs"))
        return not encoded and all(name == "attention_mask" and bool(x.all()) for name, x in tensors.items())

    def was_joined(self) -> None:
        """Count a token that a joined pass has read."""
        self._joined += 1

    # ── its next token ───────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def is_greedy(self) -> bool:
        """True if its next token is that of the largest logit."""
        return not (self.draws or self.processors)

    def choose(self, logits: Tensor) -> int:
        """Choose the next token by logits ``[1, V]``, as transformers does. Raises what a processor raises.

        The likeliest is that of the logits as they are; processors and draws have them in float32.
        """
        if not self.draws and not math.isfinite(float(logits.max())):
            raise no_finite_logits()
        process: Any = self.processors
        scores: Tensor = logits if self.is_greedy else logits.float()
        scores = process(self.tensor, scores) if self.processors else scores
        if scores.ndim != 2 or len(scores) != 1:
            raise InvalidCheckpoint.at("model", "it predicts several tokens at a time, as models of audio do")
        if self.draws:
            probabilities = torch.softmax(scores, -1)
            return int(torch.multinomial(probabilities, 1, generator=self.generator))
        return int(scores.argmax(-1))


def reports_of(texts: Sequence[RunningText], weights: PassWeights) -> Reports:
    """The reports on the attention of the last tokens of a pass, by which probes of heads have scored them."""
    looking: dict[TokenAttention, Sequence[int]] = {}
    for text in texts:
        looking |= dict.fromkeys(text.looks, text.ids)
    if not looking:
        return {}
    reports: Reports = weights.reports(looking)
    for text in texts:
        if text.watch is not None and text.watch.looks:
            text.watch.take(reports)
    return reports
