"""The input of a whole model: texts, tokens or messages as ids, padded to one batch, with labels for reading."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import (
    AudioPart,
    InputAudioPart,
    Message,
    MessagePart,
    ModelInput,
    TextPart,
    TokenLabelsReply,
)
from attention_service.models.inputs.conversations import (
    ANSWER,
    ChatForm,
    Conversation,
    TemplateMessage,
    as_template_reads,
    token_parts,
    write_conversation,
)
from attention_service.models.inputs.input_stacks import Inputs, SizedImage, Span, Stack, Tokens, parted_answer
from attention_service.models.inputs.model_limits import (
    first_token,
    is_classifier,
    max_length,
    positions_behind_padding,
    runs_over_padding,
    takes_last_token,
    vocabulary_size,
)
from attention_service.models.inputs.patch_grids import patch_labels
from attention_service.models.inputs.readable_tokens import ReadableTokens
from attention_service.models.passes.attention_places import TARGET, TEXT

FactT = TypeVar("FactT")
_HEARS_NONE: Final = "this model hears none; send text, tokens or messages"


def medium_of(part: MessagePart) -> str | None:
    """The medium of a part of a message, ``image`` or ``audio``; None for text."""
    if isinstance(part, TextPart):
        return None
    return "audio" if isinstance(part, AudioPart | InputAudioPart) else "image"


class InputReader:
    """Reads the inputs of one model."""

    short_text = TEXT
    """The tokens of the text of the short run, or the frames of its sound."""
    packs = False
    """True if all images are one sequence in the layers that see them."""
    rate = 0
    """Samples a second of its sounds; 0 of a model that hears none."""
    edge = 0
    """The ``shortest_edge`` of the image processor."""
    leaves_out = False
    """True if the model sees a part of its input, chosen at random."""
    shifts = False
    """True if the decoder reads the text itself, moved by one token, as in classifiers of BART and T5."""
    last_states: int | None = None
    """The last hidden states of an input, of a model whose layers merge its tokens; None for one of each token."""
    senses = "sees images"
    """The input of layers that do not read texts."""
    no_tokenizer = "the checkpoint has no tokenizer"
    """The reason for which texts are refused, if they are."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        config = model.config
        self.pairs = bool(config.is_encoder_decoder)
        """True for a model with an encoder and a decoder."""
        self.tokenizer = tokenizer
        self.template: Any = default_template(getattr(tokenizer, "chat_template", None))
        """The chat template."""
        self.names = frozenset(inspect.signature(model.forward).parameters)
        """The names of the model's arguments."""
        behind = positions_behind_padding(model)
        self.max_length = max_length(model) if behind is None else behind
        self.vocabulary = self._known_ids(model)
        """The number of token ids that the model reads."""
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._classifies = is_classifier(model)
        self.shifts = self.pairs and self._classifies
        self.predictable = self.vocabulary if head is None else int(head.weight.shape[0])
        """The number of token ids that the model predicts, and that its decoder reads if it has an encoder too."""
        self._types: int | None = getattr(config.get_text_config(), "type_vocab_size", None) or None
        self._device = model.device
        ahead = bool(model.can_generate()) or takes_last_token(model)
        self.pads_left = ahead and not self.pairs and not runs_over_padding(model)
        """True if texts of one batch are filled up at their beginnings."""
        self._counts_positions = "position_ids" in self.names and behind is None
        """False for a model that takes no positions, or counts them itself from the tokens that are no padding."""
        pad: Any = getattr(config.get_text_config(), "pad_token_id", None)
        self._pad = int(pad) if self.knows(pad) else 0
        self._start = first_token(model, self._pad)
        self._cleaner = ReadableTokens(tokenizer)
        self.takes_no_images = "this model takes none; send text, tokens or messages"
        """The reason for a request with images."""

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
        found = [] if self.tokenizer is None else ["text"]
        found += ["text_pair"] if self.tokenizer is not None and self._classifies else []
        found += ["messages"] if self.tokenizer is not None and self.template else []
        reads_target = self.pairs and not self.shifts and self.tokenizer is not None
        return [*found, "target"] if reads_target else found

    def module(self, model: PreTrainedModel, arguments: Mapping[str, Tensor]) -> Callable[..., Any]:
        """The part of a model that reads these arguments: all of it."""
        return model

    def absent(self, inputs: Inputs) -> str | None:
        """The tokens that an input does not have, as queries of a layer are named; None if it has all."""
        return None

    def read(self, request: ModelInput) -> Inputs:
        """Read the input of a request. Raises InvalidRequest that names the field at fault."""
        if request.images:
            raise InvalidRequest.at("images", self.takes_no_images)
        if request.all_audio:
            raise InvalidRequest.at("audio", _HEARS_NONE)
        texts, field, several = self.texts(request)
        for index, text in enumerate(texts):
            self.check(text.ids, f"{field}.{index}" if several else field)
        stack, target = self.batch(texts), None
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

    def sized(self, width: int, height: int) -> SizedImage:
        """Return the tokens of an image of this size. Raises InvalidRequest."""
        raise InvalidRequest.at("images", self.takes_no_images)

    def front_bytes(self, arguments: Mapping[str, Tensor]) -> int:
        """The memory that a model takes before its first layer, besides states as wide as that."""
        return 0

    def batch(self, texts: Sequence[Tokens]) -> Stack:
        """Pad texts to one batch: at the left for a model that generates, else at the right."""
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
        )  # fmt: skip

    def _filled(self, facts: Sequence[FactT | None], length: int) -> list[FactT | None]:
        """Facts of tokens, filled up as these are."""
        missing: list[FactT | None] = [None] * (length - len(facts))
        return [*missing, *facts] if self.pads_left else [*facts, *missing]

    def arguments(self, stack: Stack) -> dict[str, Tensor]:
        """The model's arguments for one batch: positions count from the first token that is no padding."""
        found = {"input_ids": stack.ids}
        if stack.segments is not None:
            found["token_type_ids"] = stack.segments
        if stack.mask is not None:
            found["attention_mask"] = stack.mask.long()
            if self.pads_left and self._counts_positions:
                found["position_ids"] = (stack.mask.long().cumsum(-1) - 1).clamp_min(0)
        return found

    def _arguments(self, made: dict[str, Any]) -> dict[str, Tensor]:
        """The arguments of the model's ``forward``, of what a processor made."""
        names = self.names - {"labels"}  # of training
        found = {name: x.to(self._device) for name, x in made.items() if name in names and isinstance(x, Tensor)}
        if (mask := found.get("attention_mask")) is not None and bool(mask.all()):
            del found["attention_mask"]
        return found

    def labels(self, stack: Stack) -> list[TokenLabelsReply]:
        """The labels of every token of each text, those of padding included."""
        found = []
        for row, (ids, spans) in enumerate(zip(stack.host_ids.tolist(), stack.spans, strict=True)):
            single = ids[: len(ids) - len(stack.compressed)]
            tokens = self._cleaner.tokens(single) if stack.names is None else stack.names[row]
            tokens = [*tokens, *(f"[{each.start}…{each.stop - 1}]" for each in stack.compressed)]
            more = {} if stack.patches is None else patch_labels(stack.patches[row])
            more |= {} if stack.seconds is None else {"seconds": stack.seconds[row]}
            if stack.parts is not None:
                more["parts"] = stack.parts[row]
            found.append(TokenLabelsReply.model_construct(tokens=tokens, ids=ids, spans=spans, **more))
        return found

    def readable(self, ids: Sequence[int]) -> list[str]:
        """The tokens of these ids, cleaned for reading."""
        return self._cleaner.tokens(ids)

    def token_id(self, token: int | str, param: str) -> int:
        """The id of a token, given as such or as a text that is one token. Raises InvalidRequest."""
        if isinstance(token, int):
            self._check_known([token], param, self.predictable)
            return token
        if self.tokenizer is None:
            raise InvalidRequest.at(param, f"{self.no_tokenizer}; send a token id")
        ids = self.tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise InvalidRequest.at(
                param, f"{token!r} is {len(ids)} tokens ({', '.join(self.readable(ids))}); expected one"
            )
        self._check_known(ids, param, self.predictable)
        return int(ids[0])

    def conversation(
        self, messages: Sequence[Message], form: ChatForm | None = None, *, parted: bool = False
    ) -> Conversation:
        """A conversation as the checkpoint's chat template writes it. ``parted``: find the messages in it.

        Raises InvalidRequest.
        """
        turns = [as_template_reads(each, self.content(each)) for each in messages]
        return self._written(turns, form or ChatForm(), parted=parted)

    def _written(self, messages: Sequence[TemplateMessage], form: ChatForm, *, parted: bool) -> Conversation:
        if self.tokenizer is None:
            raise InvalidRequest.at("messages", f"{self.no_tokenizer}; send tokens")
        if not self.template:
            raise InvalidRequest.at(
                "messages", "the checkpoint has no default chat template; send the conversation as text"
            )
        return write_conversation(self.tokenizer, self.template, messages, form, parted=parted)

    def content(self, message: Message) -> Any:
        """The content of a message for the chat template: one text. Raises InvalidRequest for an image."""
        if message.content is None or isinstance(message.content, str):
            return message.content
        if (other := next(filter(None, map(medium_of, message.content)), None)) is not None:
            raise self.refused_part(other)
        return "".join(part.text for part in message.content if isinstance(part, TextPart))

    def refused_part(self, medium: str | None) -> InvalidRequest:
        """The error for a part of a message that the model does not read."""
        why = f"audio: {_HEARS_NONE}" if medium == "audio" else f"images: {self.takes_no_images}"
        return InvalidRequest.at("messages", why)

    def texts(self, request: ModelInput) -> tuple[list[Tokens], str, bool]:
        """The texts of a request, the field that they came in, and True if they came as a list."""
        if request.tokens is not None:
            several = isinstance(request.tokens[0], list)
            lists: Any = request.tokens if several else [request.tokens]
            types: Any = request.token_type_ids if several else [request.token_type_ids]
            types = types or [None] * len(lists)
            self._check_types(types)
            pairs = zip(lists, types, strict=True)
            return [Tokens(ids, [None] * len(ids), segments=kinds) for ids, kinds in pairs], "tokens", several
        if request.messages is not None:
            form = ChatForm.of(request)
            written = self.conversation(request.messages, form, parted=True)
            read = self.tokens(written.text, "messages", special=False)
            return [read._replace(parts=token_parts(read.spans, written.parts))], "messages", False
        if request.text is None:
            raise InvalidRequest.at("text", "expected text, tokens or messages")
        beside = request.text_pair if request.answer is None else request.answer
        several = isinstance(request.text, list) or isinstance(beside, list)
        found = []
        for index in range(request.inputs):
            place = f"text.{index}" if isinstance(request.text, list) else "text"
            text, second = nth(request.text, index) or "", nth(beside, index)
            if request.answer is None:
                found.append(self.tokens(text, place, pair=second))
            else:
                found.append(self.answered(text, second or "", place))
        return found, "text", several

    def answered(self, text: str, answer: str, param: str) -> Tokens:
        """The tokens of a text and a given answer behind it, read as one text. Raises InvalidRequest.

        A token of the last characters of the text and the first of the answer is the answer's.
        """
        if self.pairs:
            raise InvalidRequest.at("answer", "the model has a decoder of its own; send the answer as target")
        if self.tokenizer is not None and not self.tokenizer.is_fast:  # which tells no characters
            first, second = self.tokens(text, param), self.tokens(answer, "answer", special=False)
            parts = ["text"] * len(first.ids) + [ANSWER] * len(second.ids)
            return Tokens(first.ids + second.ids, first.spans + second.spans, [*parts])
        return parted_answer(self.tokens(text + answer, param), len(text))

    def _check_types(self, types: Sequence[Sequence[int] | None], param: str = "token_type_ids") -> None:
        """Raise InvalidRequest for types of tokens that the model does not have."""
        given = [each for each in types if each is not None]
        if given and "token_type_ids" not in self.names:
            raise InvalidRequest.at(param, "the model has no types of tokens; leave them out")
        if given and self._types is not None and (largest := max(map(max, given))) >= self._types:
            raise InvalidRequest.at(
                param, f"a token has type {largest}; the model has {self._types} types", limit=self._types
            )

    def tokens(
        self, text: str, param: str, *, pair: str | None = None, special: bool = True, limit: int | None = None
    ) -> Tokens:
        """The tokens of a text, or of two, cut to ``limit``; ``special``: with those that the tokenizer adds.

        Raises InvalidRequest.
        """
        if self.tokenizer is None:
            raise InvalidRequest.at(param, f"{self.no_tokenizer}; send tokens")
        fast = bool(self.tokenizer.is_fast)
        found = self.tokenizer(
            text, pair, add_special_tokens=special, return_offsets_mapping=fast, truncation=limit is not None,
            max_length=limit,
        )  # fmt: skip
        ids = list(found["input_ids"])
        if not ids:
            raise InvalidRequest.at(param, "the tokenizer returns no tokens for it; send a longer text")
        kinds = found.get("token_type_ids") if pair is not None and "token_type_ids" in self.names else None
        segments = list(kinds) if kinds is not None and any(kinds) else None
        self._check_types([segments], param)
        if not fast:
            return Tokens(ids, [None] * len(ids), segments=segments)
        spans = [(a, b) if a < b else None for a, b in found["offset_mapping"]]
        parts = None
        if pair is not None:
            parts = [None if each is None else ("text", "text_pair")[each] for each in found.sequence_ids(0)]
        return Tokens(ids, spans, parts, segments)

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
        return Tokens(list(tokenizer(text_target=target)["input_ids"]), self.tokens(target, "target").spans)

    def _known_ids(self, model: PreTrainedModel) -> int:
        """The number of token ids that the model reads. Raises InvalidCheckpoint."""
        return vocabulary_size(model)

    def knows(self, token: Any) -> bool:
        """True for the id of a token that the model has an embedding of, as a config may not state."""
        return isinstance(token, int) and 0 <= token < self.vocabulary

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for ids that the model does not know, and for more than it has positions for."""
        self._check_count(ids, param)
        self._check_known(ids, param, self.vocabulary)

    def _check_count(self, ids: Sequence[int], param: str) -> None:
        if self.max_length is not None and len(ids) > self.max_length:
            raise InvalidRequest.at(
                param, f"{len(ids)} tokens; the model has positions for {self.max_length}", limit=self.max_length
            )

    def _check_known(self, ids: Sequence[int], param: str, known: int) -> None:
        if (largest := max(ids)) >= known:
            raise InvalidRequest.at(
                param,
                f"token {largest} is out of range; the vocabulary has {known} tokens, numbered from 0",
                limit=known,
            )


def nth(texts: str | list[str] | None, index: int) -> str | None:
    """One of several texts; the same each time if there is one alone."""
    return texts[index % len(texts)] if isinstance(texts, list) else texts


def default_template(named: Any) -> Any:
    """The chat template to use, of one or of several by name; None without one."""
    return named.get("default") if isinstance(named, dict) else named
