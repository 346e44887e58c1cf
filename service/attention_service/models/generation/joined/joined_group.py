"""Texts that share their passes, and the trial that finds out whether those of a model can."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from attention_service.core.tensors import wide
from attention_service.models.generation.decode_attention import Decoding, RowEdits
from attention_service.models.generation.generated_text import GeneratedText
from attention_service.models.generation.joined.joined_past import JoinedPast
from attention_service.models.generation.running_text import RunningText, begin_text
from attention_service.models.loaded.loaded_model import LoadedModel

_TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""The largest difference of logits in a trial, as a share of the largest."""
_TRIED: Final = [1, 2, 3], [3, 1, 2, 1, 2], [2, 3, 1]
"""The texts of a trial: the first two have unlike lengths, the first and the last the same."""
_NEXT: Final = 2, 1, 3
"""The tokens that follow."""


@dataclass(frozen=True)
class Joining:
    """The texts of a model that share passes."""

    unlike: bool
    """True for texts of any lengths."""
    alike: bool
    """True for texts of one length."""
    direct: bool = False
    """True if its attention gets keys as the past returns them."""
    in_parts: bool = False
    """True if a prompt can be read in parts."""
    reason: str | None = None
    """Why texts of unlike lengths share none."""


ALONE: Final = Joining(unlike=False, alike=False)


class JoinedGroup:
    """Texts that share their passes."""

    def __init__(self, model: Any, *, direct: bool) -> None:
        self._model = model
        self._by_past: dict[int, RunningText] = {}
        config = model.config.get_text_config(decoder=True)
        self.past = JoinedPast(direct=direct, kinds=getattr(config, "layer_types", None) or ())

    @property
    def texts(self) -> list[RunningText]:
        """The texts, in the order of the rows of a pass."""
        return [self._by_past[id(each)] for each in self.past.texts]

    def hold(self, wanted: Sequence[RunningText]) -> list[RunningText]:
        """Let these texts share passes from now on, and no other. Returns those for which memory is missing."""
        own = {id(text) for text in wanted}
        for text in self.texts:
            if id(text) not in own:
                self.remove(text, give_back=True)
        missing = []
        for text in wanted:
            past = text.past
            if id(past) in self._by_past or text.fault is not None:
                continue
            try:
                self.past.add(past, text.seen)
                self._by_past[id(past)] = text
            except RuntimeError:  # as PyTorch says that memory is missing
                missing.append(text)
        return missing

    def remove(self, text: RunningText, *, give_back: bool) -> None:
        """Let a text go; ``give_back``: it goes on elsewhere, or has the fault by which it cannot."""
        past = text.past
        if self._by_past.pop(id(past), None) is not None:
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
        device = self._model.device
        past.begin(device)
        arguments: dict[str, Any] = dict(texts[0].sharing.constants)
        arguments["input_ids"] = torch.tensor([[text.ids[-1]] for text in texts], device=device)
        offsets = [offset for text in texts if (offset := text.sharing.offset) is not None]
        if offsets:
            seen = torch.tensor(past.lengths, device=device)[:, None]
            arguments["position_ids"] = torch.cat(offsets, -2) + seen
        output = self._model(**arguments, **{texts[0].past_name: past}, return_dict=True)
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
    reason: str | None = None
    for alike in (False, True):
        chosen = [_TRIED[0], _TRIED[2] if alike else _TRIED[1]]
        try:
            texts = [_prompted(loaded, attention, ids) for ids in chosen]
            if (why := texts[0].sharing.reason) is not None:
                return Joining(unlike=False, alike=False, reason=why)
            states = any(isinstance(each, LinearAttentionCacheLayerMixin) for each in texts[0].past.layers)
            differs, handed_on = _difference(loaded, attention, texts, chosen)
        except Exception as fault:
            reason = reason or f"a trial failed: {type(fault).__name__}: {str(fault).partition(chr(10))[0][:200]}"
            continue
        if differs <= _TOLERANCE[loaded.model.dtype]:
            return Joining(unlike=not alike, alike=True, direct=handed_on, in_parts=not states, reason=reason)
        reason = reason or f"joined logits differ by {differs:.1e} of the largest"
    return Joining(unlike=False, alike=False, reason=reason)


def _prompted(loaded: LoadedModel, attention: Decoding, ids: Sequence[int]) -> RunningText:
    """A text whose first tokens have been read."""
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    with attention.running([]):
        begun = begin_text(loaded.model, ids, settings, {})
    text = RunningText(
        0, loaded.model, begun.ids, begun.state, LogitsProcessorList(), draws=False,
        text=GeneratedText(loaded.reader.decoder, [], ()),
        edits=RowEdits(loaded, {}), look=None, alone=False, request=0,
    )  # fmt: skip
    with attention.running([text]):
        text.advance(loaded.model(**text.prompt_inputs(range(len(ids)), whole=True), return_dict=True))
    text.seen = len(text.ids)
    text.ids.append(_NEXT[0])
    return text


def _difference(
    loaded: LoadedModel, attention: Decoding, texts: Sequence[RunningText], chosen: Sequence[Sequence[int]]
) -> tuple[float, bool]:
    """The largest difference of joined logits as a share of the largest, and True if keys were handed on."""
    others = [_prompted(loaded, attention, ids) for ids in chosen]
    group, differs, handed_on = JoinedGroup(loaded.model, direct=False), 0.0, True
    group.hold(texts)
    for token in _NEXT[1:]:
        with attention.running(group.texts, group.past):
            joined = group.run()
        by_text = dict(zip(map(id, group.texts), joined, strict=True))
        handed_on = handed_on and group.past.handed_on
        group.end()
        for text, other in zip(texts, others, strict=True):
            with attention.running([other]):
                output = loaded.model(**other.step_inputs(), return_dict=True)
                other.advance(output)
            other.seen += 1
            own = wide(output.logits[0, -1])
            differs = max(differs, float((by_text[id(text)] - own).abs().max() / own.abs().max()))
            text.ids.append(token)
            other.ids.append(token)
    return differs, handed_on
