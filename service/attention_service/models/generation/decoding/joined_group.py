"""Texts that share their passes, and the trial that finds out whether those of a model can."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_service.core.tensors import wide
from attention_service.models.generation.decoding.decode_attention import Decoding
from attention_service.models.generation.decoding.pasts.encoded_layers import unread
from attention_service.models.generation.decoding.pasts.joined_past import JoinedPast
from attention_service.models.generation.decoding.pasts.text_pasts import own_past
from attention_service.models.generation.decoding.running_text import RunningText
from attention_service.models.generation.decoding.trial_texts import TOLERANCE, TrialTexts
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.counted_positions import counting_modules, counting_rows

_TRIED: Final = [1, 2, 3], [3, 1, 2, 1, 2], [2, 3, 1]
"""The texts of a trial: the first two have unlike lengths, the first and the last the same."""
_NEXT: Final = 2, 1, 3
"""The tokens that follow."""
_CAPACITY: Final = "moe_eval_capacity_token_fraction"
"""The entry of NLLB-MoE's config with the share of the tokens of a pass that an expert takes; 1 for all."""


@dataclass(frozen=True)
class Joining:
    """The texts of a model that share passes."""

    unlike: bool
    """True for texts of any lengths."""
    alike: bool
    """True for texts of one length."""
    direct: bool = False
    """True if its attention gets keys as the past returns them."""
    reads_hidden: bool = False
    """True if it reads all that its encoder made, whatever a mask names as padding."""
    counting: tuple[nn.Module, ...] = ()
    """The modules that make positions of the number of tokens before a pass."""
    reason: str | None = None
    """Why texts of unlike lengths share none."""

    def takes(self, text: RunningText) -> bool:
        """True if a text's passes can be joined with those of others."""
        return text.sharing.reason is None and (self.reads_hidden or not text.sharing.hides)


ALONE: Final = Joining(unlike=False, alike=False)


class JoinedGroup:
    """Texts that share their passes."""

    def __init__(self, model: Any, joining: Joining) -> None:
        self._model, self._counting = model, joining.counting
        self._by_past: dict[int, RunningText] = {}
        config = model.config.get_text_config(decoder=True)
        self.past = JoinedPast(direct=joining.direct, kinds=getattr(config, "layer_types", None) or ())

    @property
    def texts(self) -> list[RunningText]:
        """The texts, in the order of the rows of a pass."""
        return [self._by_past[id(kept)] for kept in self.past.texts]

    def hold(self, wanted: Sequence[RunningText]) -> list[RunningText]:
        """Make the group exactly these texts. Returns those that did not fit."""
        own = {id(text) for text in wanted}
        for text in self.texts:
            if id(text) not in own:
                self.remove(text, give_back=True)
        missing = []
        for text in wanted:
            past = text.past
            if id(own_past(past)) in self._by_past or text.fault is not None:
                continue
            try:
                self.past.add(past, text.seen)
                self._by_past[id(own_past(past))] = text
            except RuntimeError:  # as PyTorch says that memory is missing
                missing.append(text)
        return missing

    def remove(self, text: RunningText, *, give_back: bool) -> None:
        """Let a text go; ``give_back``: it goes on elsewhere, or has the fault by which it cannot."""
        past = text.past
        if self._by_past.pop(id(own_past(past)), None) is not None:
            try:
                self.past.remove(past, give_back=give_back)
            except RuntimeError as fault:
                text.fault = fault

    def dissolve(self) -> None:
        """Let all texts go on elsewhere."""
        for text in self.texts:
            self.remove(text, give_back=True)

    def run(self) -> Tensor:
        """Run one pass over the last token of each text. Returns logits ``[B, V]`` in float32 or float64."""
        texts, past = self.texts, self.past
        device, sharing = self._model.device, texts[0].sharing
        past.begin(device)
        before = "" if sharing.encoded is None else "decoder_"
        arguments: dict[str, Any] = dict(sharing.constants) | {texts[0].past_name: past.argument}
        arguments[f"{before}input_ids"] = torch.tensor([[text.ids[-1]] for text in texts], device=device)
        if sharing.encoded is not None:  # its numbers are in the past; its presence alone counts
            states = unread(sharing.encoded[0][:, None], len(texts), 1)[:, 0]
            arguments["encoder_outputs"] = type(sharing.encoded)(**{**sharing.encoded, "last_hidden_state": states})
        offsets = [offset for text in texts if (offset := text.sharing.offset) is not None]
        if offsets:
            seen = torch.tensor(past.lengths, device=device)[:, None]
            arguments[f"{before}position_ids"] = torch.cat(offsets, -2) + seen
        with counting_rows(() if offsets else self._counting, past.lengths):
            output = self._model(**arguments, return_dict=True)
        logits: Tensor = wide(output.logits[:, -1], copy=True)
        return logits

    def end(self) -> None:
        """Keep what the pass has added."""
        for text in self.texts:
            text.seen += 1
            text.was_joined()
        for past in self.past.end():  # the next ``hold`` gives them more places
            self.remove(self._by_past[id(past)], give_back=True)


def try_joining(loaded: LoadedModel, attention: Decoding) -> Joining:
    """Run short texts alone and joined, and compare their logits."""
    if loaded.attention.way == "observed" and loaded.places:
        return Joining(unlike=False, alike=False, reason="it computes its attention itself")
    if getattr(loaded.model.config, _CAPACITY, 1.0) != 1:
        return Joining(unlike=False, alike=False, reason="its experts leave out tokens that are too many in a pass")
    reason: str | None = None
    counting = counting_modules(loaded.model)
    for alike in (False, True):
        trial = _TwoTexts(loaded, attention, alike=alike)
        try:
            texts = trial.texts()
            if (why := texts[0].sharing.reason) is not None:
                return Joining(unlike=False, alike=False, reason=why)
            differs, handed_on = trial.difference(texts, counting)
        except Exception as fault:
            reason = reason or f"a trial failed: {type(fault).__name__}: {str(fault).partition(chr(10))[0][:200]}"
            continue
        if differs <= TOLERANCE[loaded.model.dtype]:
            hidden = any(text.sharing.hides for text in texts)
            return Joining(
                unlike=not alike, alike=True, direct=handed_on, reads_hidden=hidden, counting=tuple(counting),
                reason=reason,
            )  # fmt: skip
        reason = reason or f"joined logits differ by {differs:.1e} of the largest"
    return Joining(unlike=False, alike=False, reason=reason)


class _TwoTexts:
    """Two short texts of a model."""

    def __init__(self, loaded: LoadedModel, attention: Decoding, *, alike: bool) -> None:
        """``alike``: with pasts of the same length. What encoders make of them is unlike all the same."""
        self._loaded, self._attention, self._own = loaded, attention, TrialTexts(loaded, attention)
        pairs = loaded.reader.pairs
        self._prompts = [_TRIED[0], _TRIED[2] if alike and not pairs else _TRIED[1]]
        self._more = [(), _NEXT[:2] if pairs and not alike else ()]
        """The tokens behind the first of a decoder, which are read alone."""

    def texts(self) -> list[RunningText]:
        """The texts, whose first tokens have been read."""
        return [self._begun(ids, more) for ids, more in zip(self._prompts, self._more, strict=True)]

    def _begun(self, ids: Sequence[int], more: Sequence[int]) -> RunningText:
        text = self._own.unread(ids)
        self._own.read(text)
        for token in more:
            text.ids.append(token)
            self._own.step(text)
        text.ids.append(_NEXT[0])
        return text

    def difference(self, texts: Sequence[RunningText], counting: Sequence[nn.Module]) -> tuple[float, bool]:
        """The largest difference of joined logits as a share of the largest, and True if keys were handed on."""
        others, differs, handed_on = self.texts(), 0.0, True
        group = JoinedGroup(self._loaded.model, Joining(unlike=True, alike=True, counting=tuple(counting)))
        group.hold(texts)
        for token in _NEXT[1:]:
            with self._attention.running(group.texts, group.past):
                joined = group.run()
            by_text = dict(zip(map(id, group.texts), joined, strict=True))
            handed_on = handed_on and group.past.handed_on
            group.end()
            for text, other in zip(texts, others, strict=True):
                own = self._own.step(other)
                share = float((by_text[id(text)] - own).abs().max() / own.abs().max())
                differs = math.inf if math.isnan(share) else max(differs, share)
                text.ids.append(token)
                other.ids.append(token)
        return differs, handed_on
