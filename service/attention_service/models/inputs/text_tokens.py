"""Texts and conversations as the tokens of a model, by the checkpoint's tokenizer."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

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
from attention_service.models.inputs.input_stacks import Span, Stack, Tokens, parted_answer
from attention_service.models.inputs.long_texts import read_beside
from attention_service.models.inputs.model_limits import max_length, positions_behind_padding, vocabulary_size
from attention_service.models.inputs.patch_grids import patch_labels
from attention_service.models.inputs.token_texts import TokenDecoder
from attention_service.models.inputs.tokenizer_faults import tokenizer_faults

HEARS_NONE: Final = "this model hears none; send text, tokens or messages"


class TextReader:
    """Reads the texts of one model."""

    unread: str | None = None
    """The reason for which a tokenizer of the checkpoint is not read, if it has one."""
    text_files_changed: Callable[[], bool] = staticmethod(lambda: False)
    """Return True if the checkpoint's files of a tokenizer are others than when the model was loaded."""

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
        self.predictable = self.vocabulary if head is None else int(head.weight.shape[0])
        """The number of token ids that the model predicts, and that its decoder reads if it has an encoder too."""
        self._types: int | None = getattr(config.get_text_config(), "type_vocab_size", None) or None
        self.decoder = TokenDecoder(tokenizer)
        """The text of its tokens."""
        self.takes_no_images = "this model takes none; send text, tokens or messages"
        """The reason for a request with images."""

    @property
    def no_tokenizer(self) -> str:
        """The reason for which texts are refused, if they are."""
        if self.text_files_changed():
            return "the checkpoint's tokenizer was written after the model was loaded (unload the model to read it)"
        if self.unread is not None:
            return f"the checkpoint has no tokenizer that can be read ({self.unread})"
        return "the checkpoint has no tokenizer"

    def knows(self, token: Any) -> bool:
        """True for the id of a token that the model has an embedding of, as a config may not state."""
        return isinstance(token, int) and 0 <= token < self.vocabulary

    def end_ids(self, model: PreTrainedModel) -> list[int]:
        """The ids that end a text, by the settings of the checkpoint or its tokenizer."""
        ids: Any = getattr(model.generation_config, "eos_token_id", None)
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        return [each for each in (ids if isinstance(ids, list) else [ids]) if isinstance(each, int)]

    def labels(self, stack: Stack) -> list[TokenLabelsReply]:
        """The labels of every token of each text, those of padding included."""
        found = []
        for row, (ids, spans) in enumerate(zip(stack.host_ids.tolist(), stack.spans, strict=True)):
            single = ids[: len(ids) - len(stack.compressed)]
            tokens = self.decoder.readable(single) if stack.names is None else stack.names[row]
            tokens = [*tokens, *(f"[{each.start}…{each.stop - 1}]" for each in stack.compressed)]
            more = {} if stack.patches is None else patch_labels(stack.patches[row])
            more |= {} if stack.seconds is None else {"seconds": stack.seconds[row]}
            if stack.parts is not None:
                more["parts"] = stack.parts[row]
            found.append(TokenLabelsReply.model_construct(tokens=tokens, ids=ids, spans=spans, **more))
        return found

    def readable(self, ids: Sequence[int]) -> list[str]:
        """The tokens of these ids, cleaned for reading."""
        return self.decoder.readable(ids)

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
        found = []
        for index in range(request.inputs):
            place = f"text.{index}" if isinstance(request.text, list) else "text"
            text, second = _nth(request.text, index) or "", _nth(beside, index)
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
        read = partial(self._tokenized, self.tokenizer, text, param, pair, special=special, limit=limit)
        return read_beside((param, text, pair, special, limit), len(text) + len(pair or ""), read)

    def _tokenized(
        self, tokenizer: PreTrainedTokenizerBase, text: str, param: str, pair: str | None, *, special: bool,
        limit: int | None,
    ) -> Tokens:  # fmt: skip
        fast = bool(tokenizer.is_fast)
        with tokenizer_faults(param):
            if limit is not None and fast and pair is None and special:
                return _cut(tokenizer, text, limit)
            found = tokenizer(
                text, pair, add_special_tokens=special, truncation=limit is not None, max_length=limit
            )  # fmt: skip
        ids = list(found["input_ids"])
        if not ids:
            raise InvalidRequest.at(param, "the tokenizer returns no tokens for it; send a longer text")
        kinds = found.get("token_type_ids") if pair is not None and "token_type_ids" in self.names else None
        segments = list(kinds) if kinds is not None and any(kinds) else None
        self._check_types([segments], param)
        if not fast:
            return Tokens(ids, [None] * len(ids), segments=segments)
        spans = _spans(found.encodings[0])
        parts = None
        if pair is not None:
            parts = [None if each is None else ("text", "text_pair")[each] for each in found.sequence_ids(0)]
        return Tokens(ids, spans, parts, segments)

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

    def _known_ids(self, model: PreTrainedModel) -> int:
        """The number of token ids that the model reads. Raises InvalidCheckpoint."""
        return vocabulary_size(model)


def _cut(tokenizer: Any, text: str, limit: int) -> Tokens:
    """The first tokens of a text, with those that the tokenizer adds.

    Its own truncation is a setting of the tokenizer, which could not be written while a thread reads another text.
    """
    encoding = tokenizer(text, add_special_tokens=False).encodings[0]
    encoding.truncate(max(0, limit - tokenizer.num_special_tokens_to_add()), direction=tokenizer.truncation_side)
    found = tokenizer.backend_tokenizer.post_process(encoding)
    return Tokens(found.ids, _spans(found))


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
