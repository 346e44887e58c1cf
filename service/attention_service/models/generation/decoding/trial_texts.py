"""Short texts of a model, by which trials find out what its passes can."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from attention_service.core.tensors import wide
from attention_service.models.generation.decoding.decode_attention import Decoding
from attention_service.models.generation.decoding.generated_text import GeneratedText
from attention_service.models.generation.decoding.row_edits import RowEdits
from attention_service.models.generation.decoding.running_text import RunningText, begin_text
from attention_service.models.loaded.loaded_model import LoadedModel

TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""The largest difference of logits in a trial, as a share of the largest."""


class TrialTexts:
    """The texts of a trial, each with the states that modules of the model keep of it."""

    def __init__(self, loaded: LoadedModel, attention: Decoding) -> None:
        self._loaded, self._attention = loaded, attention

    def unread(self, ids: Sequence[int]) -> RunningText:
        """A text before its first pass."""
        loaded = self._loaded
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
        sound = {} if loaded.reader.enters != "frames" else dict(loaded.reader.short_runs()[0])
        sound.pop("decoder_input_ids", None)
        with self._attention.running([]):
            begun = begin_text(loaded.model, None if sound else ids, settings, sound)
        return RunningText(
            0, loaded.model, begun.ids, begun.state, LogitsProcessorList(), draws=False,
            text=GeneratedText(loaded.reader.decoder, [], ()),
            edits=RowEdits(loaded, {}), look=None, alone=False, request=0, held=loaded.states.take(),
        )  # fmt: skip

    def read(self, text: RunningText, part: range | None = None) -> Tensor:
        """Read a part of a prompt; None: all of it. Returns the logits ``[V]`` behind it."""
        own = range(len(text.ids)) if part is None else part
        with self._running(text):
            output = self._loaded.model(**text.prompt_inputs(own, whole=part is None), return_dict=True)
        text.seen = own.stop
        if own.stop == len(text.ids):
            text.advance(output)
        else:
            text.take_past(output)
        return wide(output.logits[0, -1])

    def step(self, text: RunningText) -> Tensor:
        """The logits ``[V]`` behind a text that runs alone."""
        with self._running(text):
            output = self._loaded.model(**text.step_inputs(), return_dict=True)
            text.advance(output)
        text.seen += 1
        return wide(output.logits[0, -1])

    @contextmanager
    def _running(self, text: RunningText) -> Iterator[None]:
        states = self._loaded.states
        states.give(text.held)
        try:
            with self._attention.running([text]):
                yield
        finally:
            states.learn()
            text.held = states.take()
