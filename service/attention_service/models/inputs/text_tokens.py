"""Texts and conversations as the tokens of a model, by the checkpoint's tokenizer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import (
    AudioPart,
    InputAudioPart,
    Message,
    MessagePart,
    ModelInput,
    TextPart,
)
from attention_service.models.inputs.input_reader import HEARS_NONE, InputReader
from attention_service.models.inputs.input_stacks import Span, Tokens, parted_answer
from attention_service.models.inputs.long_texts import read_beside
from attention_service.models.inputs.model_limits import max_length, positions_behind_padding, vocabulary_size
from attention_service.models.inputs.tokenizer_faults import tokenizer_faults
from attention_service.prompts.conversations import (
    ANSWER,
    ChatForm,
    Conversation,
    TemplateMessage,
    as_template_reads,
    token_parts,
    write_conversation,
)


class TextReader(InputReader):
    """Reads the texts of one model."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__(model, tokenizer)
        config = model.config
        self.pairs = bool(config.is_encoder_decoder)
        self.template = default_template(getattr(tokenizer, "chat_template", None))
        behind = positions_behind_padding(model)
        self.max_length = max_length(model) if behind is None else behind
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is not None:
            self.predictable = int(head.weight.shape[0])
        self._types: int | None = getattr(config.get_text_config(), "type_vocab_size", None) or None

    def token_id(self, token: int | str, param: str) -> int:
        """The id of a token, given as such or as a text that is one token. Raises InvalidRequest."""
        if isinstance(token, int):
            self._check_known([token], param, self.predictable)
            return token
        if self.tokenizer is None:
            raise InvalidRequest.at(param, f"{self.no_tokenizer}; send a token id")
        with tokenizer_faults(param):
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
        turns = [as_template_reads(message, self.content(message)) for message in messages]
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
        why = f"audio: {HEARS_NONE}" if medium == "audio" else f"images: {self.takes_no_images}"
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
        token_lists = []
        for index in range(request.inputs):
            place = f"text.{index}" if isinstance(request.text, list) else "text"
            text, second = _nth(request.text, index) or "", _nth(beside, index)
            if request.answer is None:
                token_lists.append(self.tokens(text, place, pair=second))
            else:
                answered = self.filled if self.fills_masks else self.answered
                token_lists.append(answered(text, second or "", place))
        return token_lists, "text", several

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

    def filled(self, text: str, answer: str, param: str) -> Tokens:
        """The tokens of a text whose mask tokens are those of an answer. Raises InvalidRequest for other counts."""
        read, ids = self.tokens(text, param), self.tokens(answer, "answer", special=False).ids
        self._check_known(ids, "answer", self.predictable)
        masks = sum(token == self.mask_id for token in read.ids)
        if masks != len(ids):
            raise InvalidRequest.at(
                "answer",
                f"expected as many tokens as the text has mask tokens, {masks}; got {len(ids)} "
                f"({', '.join(self.readable(ids[:8]))}{', …' if len(ids) > 8 else ''}). Write "
                f"{getattr(self.tokenizer, 'mask_token', None)} in the text once for each token of the answer",
                expected=masks,
                actual=len(ids),
            )
        special = self.special_ids
        parts = [ANSWER if token == self.mask_id else None if token in special else "text" for token in read.ids]
        return read._replace(parts=parts, answer=ids)

    def _check_types(self, types: Sequence[Sequence[int] | None], param: str = "token_type_ids") -> None:
        """Raise InvalidRequest for types of tokens that the model does not have."""
        given = [kind for kind in types if kind is not None]
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
        read = partial(self._tokenized, self.tokenizer, text, param, pair, special=special, limit=limit)
        return read_beside((param, text, pair, special, limit), len(text) + len(pair or ""), read)

    def _tokenized(
        self, tokenizer: PreTrainedTokenizerBase, text: str, param: str, pair: str | None, *, special: bool,
        limit: int | None,
    ) -> Tokens:  # fmt: skip
        fast = bool(tokenizer.is_fast)
        with tokenizer_faults(param):
            if limit is not None and fast and special:
                return _cut(tokenizer, text, limit) if pair is None else self._cut_pair(tokenizer, text, pair, limit)
            tokenized = tokenizer(
                text, pair, add_special_tokens=special, truncation=limit is not None, max_length=limit
            )  # fmt: skip
        ids = list(tokenized["input_ids"])
        if not ids:
            raise InvalidRequest.at(param, "the tokenizer returns no tokens for it; send a longer text")
        kinds = tokenized.get("token_type_ids") if pair is not None and "token_type_ids" in self.names else None
        segments = list(kinds) if kinds is not None and any(kinds) else None
        self._check_types([segments], param)
        if not fast:
            return Tokens(ids, [None] * len(ids), segments=segments)
        spans = _spans(tokenized.encodings[0])
        parts = None
        if pair is not None:
            parts = [
                None if sequence is None else ("text", "text_pair")[sequence] for sequence in tokenized.sequence_ids(0)
            ]
        return Tokens(ids, spans, parts, segments)

    def _cut_pair(self, tokenizer: Any, text: str, pair: str, limit: int) -> Tokens:
        """The first tokens of two texts, of which the longer one is cut first, with those that the tokenizer adds."""
        both = [tokenizer(one, add_special_tokens=False).encodings[0] for one in (text, pair)]
        room = max(0, limit - tokenizer.num_special_tokens_to_add(pair=True))
        for encoding, length in zip(both, longest_first(len(both[0]), len(both[1]), room), strict=True):
            encoding.truncate(length, direction=tokenizer.truncation_side)
        processed = tokenizer.backend_tokenizer.post_process(*both)
        segments = processed.type_ids if "token_type_ids" in self.names and any(processed.type_ids) else None
        self._check_types([segments], "text_pair")
        parts = [None if sequence is None else ("text", "text_pair")[sequence] for sequence in processed.sequence_ids]
        return Tokens(processed.ids, _spans(processed), parts, segments)

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for ids that the model does not know, and for fewer or more than it runs over."""
        if len(ids) < self.min_length:
            raise InvalidRequest.at(
                param,
                f"{len(ids)} {'token' if len(ids) == 1 else 'tokens'}; the model runs over texts of at least "
                f"{self.min_length} tokens. Send a longer text",
                limit=self.min_length,
            )
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

    def _known_ids(self, model: PreTrainedModel) -> int:
        """The number of token ids that the model reads. Raises InvalidCheckpoint."""
        return vocabulary_size(model)


def _cut(tokenizer: Any, text: str, limit: int) -> Tokens:
    """The first tokens of a text, with those that the tokenizer adds.

    Its own truncation is a setting of the tokenizer, which could not be written while a thread reads another text.
    """
    encoding = tokenizer(text, add_special_tokens=False).encodings[0]
    encoding.truncate(max(0, limit - tokenizer.num_special_tokens_to_add()), direction=tokenizer.truncation_side)
    processed = tokenizer.backend_tokenizer.post_process(encoding)
    return Tokens(processed.ids, _spans(processed))


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the tokens that are kept of two texts: the longer one is cut first, and then both alike.

    Source: tokenizers, ``TruncationStrategy::LongestFirst``.
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


def _spans(encoding: Any) -> list[Span]:
    """The characters of each token; None for one without.

    They are asked token by token: while the tokenizer makes the list of all, which may take a tenth of a second, no
    other thread runs.
    """
    spans: list[Span] = [encoding.token_to_chars(token) for token in range(len(encoding))]
    return [span if span is not None and span[0] < span[1] else None for span in spans]


def _nth(texts: str | list[str] | None, index: int) -> str | None:
    """One of several texts; the same each time if there is one alone."""
    return texts[index % len(texts)] if isinstance(texts, list) else texts


def default_template(named: Any) -> Any:
    """The chat template to use, of one or of several by name; None without one."""
    return named.get("default") if isinstance(named, dict) else named


def medium_of(part: MessagePart) -> str | None:
    """The medium of a part of a message, ``image`` or ``audio``; None for text."""
    if isinstance(part, TextPart):
        return None
    return "audio" if isinstance(part, AudioPart | InputAudioPart) else "image"
