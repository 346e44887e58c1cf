"""The input of a whole model: texts padded to one batch, a target, and the arguments of its ``forward``."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import ModelInput
from attention_service.models.inputs.input_reader import HEARS_NONE
from attention_service.models.inputs.input_stacks import Inputs, Span, Stack, Tokens
from attention_service.models.inputs.model_limits import (
    first_token,
    is_classifier,
    positions_behind_padding,
    takes_last_token,
)
from attention_service.models.inputs.question_tokens import QuestionTokens
from attention_service.models.inputs.text_tokens import TextReader
from attention_service.models.inputs.tokenizer_faults import tokenizer_faults
from attention_service.models.passes.attention_places import TARGET, TEXT, VISION

FactT = TypeVar("FactT")


class TextInputs(TextReader):
    """Reads texts as the input of one model, with a target if it has a decoder."""

    tower = "vision_config", VISION  # of a model whose images are not read, too

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__(model, tokenizer)
        self._classifies = is_classifier(model)
        self.shifts = self.pairs and self._classifies
        self._global = QuestionTokens.of(model)
        ahead = bool(model.can_generate()) or takes_last_token(model)
        self.pads_left = ahead and not self.pairs
        self._counts_positions = "position_ids" in self.names and positions_behind_padding(model) is None
        """False for a model that takes no positions, or counts them itself from the tokens that are no padding."""
        pad: Any = getattr(model.config.get_text_config(), "pad_token_id", None)
        self._pad = int(pad) if self.knows(pad) else 0
        self._start = first_token(model, self._pad)

    def short_runs(self) -> list[dict[str, Tensor]]:
        """The arguments of a run over a few tokens: ``TEXT``, and ``TARGET`` of a target; then of others."""
        text = self.batch([Tokens([*range(1, TEXT + 1)], [None] * TEXT)])
        arguments = self.arguments(text)
        if self.pairs:
            arguments["decoder_input_ids"] = text.ids[:, :TARGET]
        return [arguments]

    @property
    def takes(self) -> list[str]:
        """The inputs that requests may have."""
        fields = [] if self.tokenizer is None else ["text"]
        fields += ["text_pair"] if self.tokenizer is not None and self._classifies else []
        fields += ["messages"] if self.tokenizer is not None and self.template else []
        reads_target = self.pairs and not self.shifts and self.tokenizer is not None
        return [*fields, "target"] if reads_target else fields

    def read(self, request: ModelInput) -> Inputs:
        """Read the input of a request. Raises InvalidRequest that names the field at fault."""
        if request.images:
            raise InvalidRequest.at("images", self.takes_no_images)
        if request.all_audio:
            raise InvalidRequest.at("audio", HEARS_NONE)
        texts, field, several = self.texts(request)
        for index, text in enumerate(texts):
            self.check(text.ids, place := f"{field}.{index}" if several else field)
            if self._global is not None:
                self._global.check(text.ids, place)
        stack, target = self.batch(texts), None
        if stack.mask is not None and self.mixes_padding(stack.length):
            beyond = f" beside one of more than {self.pads_up_to} tokens" if self.pads_up_to else ""
            raise InvalidRequest.at(
                field,
                f"padding changes the numbers of a text of this model{beyond}; send texts that have the same number of "
                "tokens, or one text a request",
            )
        arguments = self.arguments(stack)
        if self.shifts and request.target is None:
            target = self._shifted(stack)
        elif self.pairs and not self.shifts:
            target = self._target(request.target, len(texts))
        if target is not None:
            arguments["decoder_input_ids"] = target.ids
        elif request.target is not None:
            raise InvalidRequest.at("target", "the model reads only the text, and no target")
        return Inputs(several, stack, target, arguments)

    def batch(self, texts: Sequence[Tokens]) -> Stack:
        """Pad texts to one batch: see ``pads_left``."""
        length = max(len(text.ids) for text in texts)
        ids = torch.full((len(texts), length), self._pad, dtype=torch.int64)
        mask = torch.zeros(len(texts), length, dtype=torch.bool)
        typed = any(text.segments for text in texts)
        segments = torch.zeros_like(ids) if typed else None
        for row, text in enumerate(texts):
            missing = length - len(text.ids)
            place = slice(missing, length) if self.pads_left else slice(0, length - missing)
            ids[row, place], mask[row, place] = torch.tensor(text.ids), True
            if segments is not None and text.segments:
                segments[row, place] = torch.tensor(text.segments)
        padded = not bool(mask.all())
        parts = [self._filled(text.parts or [None] * len(text.ids), length) for text in texts]
        return Stack(
            ids.to(self._device), mask.to(self._device) if padded else None,
            [self._filled(text.spans, length) for text in texts],
            parts=parts if any(text.parts for text in texts) else None,
            segments=None if segments is None else segments.to(self._device),
            answers=[text.answer or [] for text in texts] if any(text.answer for text in texts) else None,
        )  # fmt: skip

    def _filled(self, facts: Sequence[FactT | None], length: int) -> list[FactT | None]:
        """Facts of tokens, filled up as these are."""
        missing: list[FactT | None] = [None] * (length - len(facts))
        return [*missing, *facts] if self.pads_left else [*facts, *missing]

    def arguments(self, stack: Stack) -> dict[str, Tensor]:
        """The model's arguments for one batch: positions count from the first token that is no padding."""
        arguments = {"input_ids": stack.ids}
        if self._global is not None:
            arguments["global_attention_mask"] = self._global.mask(stack.ids)
        if stack.segments is not None:
            arguments["token_type_ids"] = stack.segments
        if stack.mask is not None:
            arguments["attention_mask"] = stack.mask.long()
            if self.pads_left and self._counts_positions:
                arguments["position_ids"] = (stack.mask.long().cumsum(-1) - 1).clamp_min(0)
        return arguments

    def _arguments(self, made: dict[str, Any]) -> dict[str, Tensor]:
        """The arguments of the model's ``forward``, of what a processor made."""
        names = self.names - {"labels"}  # of training
        tensors = {name: x.to(self._device) for name, x in made.items() if name in names and isinstance(x, Tensor)}
        if (mask := tensors.get("attention_mask")) is not None and bool(mask.all()):
            del tensors["attention_mask"]
        return tensors

    def _shifted(self, stack: Stack) -> Stack:
        """The decoder's tokens of a classifier: those of the text behind its first token."""
        ids = stack.ids.roll(1, 1)
        ids[:, 0] = self._start
        spans = [[None, *row[:-1]] for row in stack.spans]
        parts = None if stack.parts is None else [[None, *row[:-1]] for row in stack.parts]
        return Stack(ids, None, spans, parts=parts)

    def _target(self, target: str | None, batch: int) -> Stack:
        ids = [self._start]
        spans: list[Span] = [None]
        if target is not None:
            if self.tokenizer is None:
                raise InvalidRequest.at("target", self.no_tokenizer)
            added = self._target_tokens(self.tokenizer, target)
            if added.ids[:1] == ids:  # the tokenizers of Whisper put it there
                ids, spans = [], []
            ids += added.ids
            spans += added.spans if len(added.spans) == len(added.ids) else [None] * len(added.ids)
        self._check_count(ids, "target")
        self._check_known(ids, "target", self.predictable)
        return Stack(torch.tensor([ids] * batch, device=self._device), None, [spans] * batch)

    def _target_tokens(self, tokenizer: PreTrainedTokenizerBase, target: str) -> Tokens:
        """The tokens of a target, with those that the tokenizer adds to one."""
        with tokenizer_faults("target"):
            ids = list(tokenizer(text_target=target)["input_ids"])
        return Tokens(ids, self.tokens(target, "target").spans)
