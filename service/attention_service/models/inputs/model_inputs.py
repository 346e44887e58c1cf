"""The input of a whole model: texts, tokens or messages as ids, padded to one batch, with labels for reading."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.prompts import Message, ModelInput, TextPart, TokenLabelsReply
from attention_service.models.head_kinds import head_kind
from attention_service.models.inputs.conversations import (
    ANSWER,
    ChatForm,
    Conversation,
    TemplateMessage,
    as_template_reads,
    token_parts,
    write_conversation,
)
from attention_service.models.inputs.patch_grids import Patch, patch_labels
from attention_service.models.passes.attention_places import TARGET, TEXT

_LETTERS: Final[Any] = bytes_to_unicode  # has no annotations
_BYTES: Final[dict[str, int]] = {letter: byte for byte, letter in _LETTERS().items()}
"""The byte that each character of a byte-level token stands for."""
_STRETCHED: Final = frozenset({"linear", "yarn"})
"""Rotations whose factor a config may have beside the positions without it. What a dynamic one does for a long text
depends on the texts before, so its factor is not taken."""
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte of sentencepiece."""
_NO_TOKEN: Final = -1
SOUND: Final = frozenset({"input_features", "input_values"})
"""The main arguments of models that hear."""
Span = tuple[int, int] | None
Seconds = tuple[float, float] | None
"""The part of a sound that a frame is; None behind its end."""
FactT = TypeVar("FactT")


class Tokens(NamedTuple):
    """The tokens of one text."""

    ids: list[int]
    spans: list[Span]
    """The characters of each token."""
    parts: list[str | None] | None = None
    """The field of the request that each token comes from, if there are several; None for a special token."""
    segments: list[int] | None = None
    """The type of each token, of a text whose tokens have several."""


@dataclass(frozen=True)
class Stack:
    """The tokens of one stack: a batch of texts, padded to the same length."""

    ids: Tensor
    """``[B, L]``"""
    mask: Tensor | None
    """Bool ``[B, L]``, True for a token that is no padding; None if none is."""
    spans: list[list[Span]]
    names: list[list[str]] | None = None
    """The tokens for reading, if their ids do not tell."""
    patches: list[list[Patch | None]] | None = None
    """The patch of an image that each token is."""
    parts: list[list[str | None]] | None = None
    """The field of the request that each token comes from, if there are several."""
    segments: Tensor | None = None
    """``[B, L]``: the type of each token, if there are several."""
    seconds: list[list[Seconds]] | None = None
    """The part of a sound that each token is."""
    compressed: tuple[range, ...] = ()
    """The tokens that each of the last entries stands for, in a layer that has keys of several tokens."""
    foreign: int = 0
    """The last entries that are tokens of another text, in a layer whose keys are those of two texts."""

    @property
    def length(self) -> int:
        """L."""
        return self.ids.shape[1]

    def repeated(self, times: int) -> "Stack":
        """The same tokens so many times, one batch behind the other."""
        mask = None if self.mask is None else self.mask.repeat(times, 1)
        return replace(self, ids=self.ids.repeat(times, 1), mask=mask, spans=self.spans * times)

    @cached_property
    def host_ids(self) -> NDArray[np.int64]:
        """The ids on the host."""
        found: NDArray[np.int64] = self.ids.cpu().numpy()
        return found

    @cached_property
    def positions(self) -> NDArray[np.float64] | None:
        """The position of each entry in the text ``[L]``: None for its index, NaN for one of another text.

        One that stands for several tokens is at the middle of them.
        """
        if not (self.compressed or self.foreign):
            return None
        middles = [span_middle(tokens) for tokens in self.compressed]
        behind = [*middles, *[float("nan")] * self.foreign]
        return np.array([*range(self.length - len(behind)), *behind])

    @cached_property
    def ends(self) -> list[int]:
        """Behind the last token of each text that is no padding."""
        if self.mask is None:
            return [self.length] * len(self.ids)
        return [int(row.nonzero()[-1]) + 1 for row in self.mask]

    @cached_property
    def starts(self) -> NDArray[np.int64] | None:
        """The first token of each text that is no padding; None if it is token 0 of all."""
        if self.mask is None or bool(self.mask[:, 0].all()):
            return None
        found: NDArray[np.int64] = self.mask.int().argmax(1).cpu().numpy()
        return found


@dataclass(frozen=True)
class Inputs:
    """The input of one request."""

    several: bool
    """True if the request has a list of texts, so that its reply has a batch dimension."""
    text: Stack
    target: Stack | None
    """The decoder's tokens, of a model with an encoder and a decoder."""
    arguments: dict[str, Tensor]
    """The arguments of the model's ``forward``."""
    images: Stack | None = None
    """The tokens of the layers that see images, beside those of the text. They always have a batch dimension."""

    @property
    def predicted(self) -> Stack:
        """The tokens whose predictions the model makes."""
        return self.target or self.text

    @cached_property
    def answers(self) -> list[list[int]]:
        """The indices of the tokens of each text's given answer, or target, but for a first token of all."""
        stack = self.predicted
        if self.target is not None:
            return [[*range(1, stack.length)]] * len(stack.ids)
        parts = stack.parts or [[]] * len(stack.ids)
        starts = stack.starts if stack.starts is not None else [0] * len(stack.ids)
        return [
            [at for at, part in enumerate(row) if part == ANSWER and at > start]
            for row, start in zip(parts, starts, strict=True)
        ]


class SizedImage(NamedTuple):
    """The tokens of an image of some size."""

    text: int
    """In the text; of an encoder, all of the image."""
    crops: int
    length: int
    """Tokens of a crop, in the layers that see it."""
    windows: tuple[int, ...] = ()
    """Tokens of each window, in layers that attend within windows."""
    decoding: int = 0
    """Bytes that it takes to decode it."""


class InputReader:
    """Reads the inputs of one model."""

    short_text = TEXT
    """The tokens of the text of the short run, or the frames of its sound."""
    packs = False
    """True if all images are one sequence in the layers that see them."""
    edge = 0
    """The ``shortest_edge`` of the image processor."""
    shifts = False
    """True if the decoder reads the text itself, moved by one token, as in classifiers of BART and T5."""
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
        behind = _positions_behind_padding(model)
        self.max_length = _max_length(model) if behind is None else behind
        self.vocabulary = self._known_ids(model)
        """The number of token ids that the model reads."""
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._classifies = is_classifier(model)
        self.shifts = self.pairs and self._classifies
        self.predictable = self.vocabulary if head is None else int(head.weight.shape[0])
        """The number of token ids that the model predicts, and that its decoder reads if it has an encoder too."""
        self._types: int | None = getattr(config.get_text_config(), "type_vocab_size", None) or None
        self._device = model.device
        self.pads_left = (bool(model.can_generate()) or takes_last_token(model)) and not self.pairs
        """True if texts of one batch are filled up at their beginnings."""
        self._counts_positions = "position_ids" in self.names and behind is None
        """False for a model that takes no positions, or counts them itself from the tokens that are no padding."""
        pad: Any = getattr(config.get_text_config(), "pad_token_id", None)
        self._pad = int(pad) if self.knows(pad) else 0
        self._start = _first_token(model, self._pad)
        self._cleaner = _Cleaner(tokenizer)
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

    def read(self, request: ModelInput) -> Inputs:
        """Read the input of a request. Raises InvalidRequest that names the field at fault."""
        if request.images:
            raise InvalidRequest.at("images", self.takes_no_images)
        if request.audio:
            raise InvalidRequest.at("audio", "this model hears none; send text, tokens or messages")
        texts, field, several = self._texts(request)
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
        if not all(isinstance(part, TextPart) for part in message.content):
            raise InvalidRequest.at("messages", f"images: {self.takes_no_images}")
        return "".join(part.text for part in message.content if isinstance(part, TextPart))

    def _texts(self, request: ModelInput) -> tuple[list[Tokens], str, bool]:
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
        return _vocabulary(model)

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


def span_middle(tokens: range) -> float:
    """The position of a key that stands for several tokens: the middle of them."""
    return (tokens.start + tokens.stop - 1) / 2


def nth(texts: str | list[str] | None, index: int) -> str | None:
    """One of several texts; the same each time if there is one alone."""
    return texts[index % len(texts)] if isinstance(texts, list) else texts


def parted_answer(read: Tokens, begin: int) -> Tokens:
    """The tokens of a text and of an answer that begins at this character, with their characters in either."""
    parts: list[str | None] = []
    spans: list[Span] = []
    for span in read.spans:
        in_answer = span is not None and span[1] > begin
        parts.append(None if span is None else ANSWER if in_answer else "text")
        spans.append((max(span[0] - begin, 0), span[1] - begin) if span is not None and in_answer else span)
    return read._replace(spans=spans, parts=parts)


def is_classifier(model: PreTrainedModel) -> bool:
    """True for a model that predicts classes."""
    kind = head_kind(type(model).__name__)
    return kind is not None and kind.predicts == "class"


def takes_last_token(model: PreTrainedModel) -> bool:
    """True for a classifier that takes the state of the last token, and knows no padding by which to find it.

    transformers refuses several texts then. With a padding that no token is, the last token is the last of the batch.
    """
    config = model.config.get_text_config()
    kind = head_kind(type(model).__name__)
    if kind is None or kind.predicts != "class" or kind.unit != "input" or model.main_input_name in SOUND:
        return False
    if getattr(config, "pad_token_id", None) is not None:
        return False
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(2, 2, dtype=torch.int64, device=model.device))
    except ValueError:
        config.pad_token_id = _NO_TOKEN
        return True
    return False


def default_template(named: Any) -> Any:
    """The chat template to use, of one or of several by name; None without one."""
    return named.get("default") if isinstance(named, dict) else named


class _Cleaner:
    r"""Writes tokens for reading: without the marks of the tokenizer, and bytes as the text that they are.

    Bytes that are part of a character are written as ``\xe2``, so that different tokens look different.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._special: frozenset[str] = frozenset() if tokenizer is None else frozenset(tokenizer.all_special_tokens)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = "" if backend is None else json.dumps(json.loads(backend.to_str()).get("decoder"))
        self._by_bytes = "ByteLevel" in decoder
        self._word_pieces = "WordPiece" in decoder

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The tokens of these ids; the ids themselves without a tokenizer."""
        if self._tokenizer is None:
            return [str(each) for each in ids]
        found = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [str(each) if token is None else self._clean(str(token)) for each, token in zip(ids, found, strict=True)]

    def _clean(self, token: str) -> str:
        if token in self._special:
            return token
        if self._by_bytes:
            return _as_text(bytes(map(_BYTES.__getitem__, token))) if _BYTES.keys() >= {*token} else token
        if self._word_pieces:
            return token.removeprefix("##")
        if byte := _BYTE.fullmatch(token):
            return _as_text(bytes.fromhex(byte[1]))
        return token.replace("▁", " ")


def _as_text(raw: bytes) -> str:
    return raw.decode(errors="backslashreplace")


def _vocabulary(model: PreTrainedModel) -> int:
    """The number of rows of the table of token embeddings. Raises InvalidCheckpoint without one."""
    try:
        table: Any = model.get_input_embeddings()
        return int(table.num_embeddings)
    except (AttributeError, NotImplementedError):
        reason = f"{type(model).__name__} has no table of token embeddings, and a model here reads tokens"
        raise InvalidCheckpoint.at("checkpoint", reason) from None


def _first_token(model: PreTrainedModel, default: int) -> int:
    """The token with which a decoder begins, found as ``generate`` finds it."""
    generation = getattr(model, "generation_config", None)
    places = (
        (model.config, "decoder_start_token_id"), (generation, "decoder_start_token_id"), (generation, "bos_token_id"),
    )  # fmt: skip
    found = (getattr(place, name, None) for place, name in places)
    return next((each for each in found if isinstance(each, int)), default)


def _max_length(model: PreTrainedModel) -> int | None:
    """The most tokens for which its config has positions; None if there is no limit."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    rope: Any = getattr(config, "rope_parameters", None) or {}
    rotations = [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]
    return max([limit, *(_stretched(each, limit) for each in rotations)])


def _stretched(rotation: Mapping[str, Any], limit: int) -> int:
    """The positions that a rotation reaches; a config has one, or one for each type of its layers."""
    if rotation.get("rope_type") not in _STRETCHED:
        return limit
    return int((rotation.get("factor") or 1) * (rotation.get("original_max_position_embeddings") or limit))


def _positions_behind_padding(model: PreTrainedModel) -> int | None:
    """The positions of a table in which they are counted from behind the padding's, as in RoBERTa; None without one."""
    for path, module in model.named_modules():
        table, padding = getattr(module, "weight", None), getattr(module, "padding_idx", None)
        named = path.rpartition(".")[2] in {"position_embeddings", "embed_positions"}
        if named and isinstance(table, Tensor) and padding is not None:
            return int(table.shape[0]) - int(padding) - 1
    return None
