"""The prompt of a text with images or sounds: the checkpoint's own processor puts them into one text."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from transformers import PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import Message, MessagePart, ModelInput, TextPart
from attention_service.models.inputs.input_stacks import Inputs, Span, Stack, Tokens, parted_answer
from attention_service.models.inputs.model_inputs import TextInputs
from attention_service.models.inputs.text_tokens import default_template, medium_of
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.prompts.conversations import ChatForm, Conversation, as_template_reads, token_parts

_OF_WINDOWS: Final = (
    "the layers of this model that see images attend over windows of patches that merge from layer to layer; their "
    "weights have no tokens in common, and cannot be multiplied"
)


class MediaPrompts(TextInputs):
    """Reads texts with images, or with sounds, of one model."""

    medium: Literal["image", "audio"]
    """The type of a part of a message that is one."""
    media: Literal["images", "audio"]
    enters = "tokens and media"
    mark: str
    """The text of the place of one."""
    before: str
    """The text of the place of one before a text."""
    token: int | None
    """The token that stands for parts of them."""
    one: str
    """The words for one of them."""

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        """``processor``: the checkpoint's."""
        super().__init__(model, processor.tokenizer)
        self.template = default_template(getattr(processor, "chat_template", None)) or self.template
        self._processor = processor
        self._wanted: dict[str, Any] = {}
        """Further arguments of the processor."""
        self._fast = self.tokenizer is not None and bool(self.tokenizer.is_fast)
        self._places: set[int | None] = set()
        """The tokens that stand for parts of them, or for one of them."""

    @property
    def takes(self) -> list[str]:
        """The inputs that requests may have."""
        return [*super().takes, self.media]

    @property
    def several(self) -> str:
        """The word for several of them."""
        return "images" if self.medium == "image" else "sounds"

    def check(self, ids: Sequence[int], param: str, *, sent: bool = False) -> None:
        """Raise InvalidRequest for ids that the model does not know, too many, or places for what did not come.

        ``sent``: True if images or sounds came.
        """
        super().check(ids, param)
        if not sent and self._places.intersection(ids):
            noun = self.one.rpartition(" ")[2]
            raise InvalidRequest.at(param, f"it has a place for {self.one}, but no {noun} was sent")

    def absent(self, inputs: Inputs) -> str | None:
        """Return ``media`` for a text without images or sounds."""
        return "media" if inputs.media is None else None

    def content(self, message: Message) -> Any:
        """The content of a message for the chat template: a list of parts. Raises InvalidRequest for another medium."""
        if message.content is None:
            return None
        parts: Sequence[MessagePart]
        parts = [TextPart(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        for part in parts:
            if (other := medium_of(part)) not in {None, self.medium}:
                raise self.refused_part(other)
        return [part.model_dump() if isinstance(part, TextPart) else {"type": self.medium} for part in parts]

    def with_places(self, messages: Sequence[Message], count: int, form: ChatForm) -> Conversation:
        """A conversation with places for so many: before the text of the first message, if it has none."""
        turns = [as_template_reads(message, self.content(message)) for message in messages]
        if not any(part["type"] == self.medium for message in turns for part in message["content"] or ()):
            turns[0]["content"] = [{"type": self.medium}] * count + (turns[0]["content"] or [])
        return self._written(turns, form, parted=True)

    def check_alone(self, request: ModelInput) -> None:
        """Raise InvalidRequest for anything that does not go with images or sounds: they go with one text."""
        if request.text_pair is not None or isinstance(request.answer, list):
            field = "answer" if request.text_pair is None else "text_pair"
            raise InvalidRequest.at(field, f"{self.several} go with one text")
        if request.target is not None or isinstance(request.text or (request.tokens or [0])[0], list):
            raise InvalidRequest.at(self.media, "they go with one text, without a target")

    def prompt(self, request: ModelInput, media: Sequence[Any]) -> tuple[dict[str, Any], Tokens, str]:
        """A request as the processor makes it, its tokens, and the field that they come from. Raises InvalidRequest."""
        if request.messages is not None:
            written = self.with_places(request.messages, len(media), ChatForm.of(request))
            made = self.processed(written.text, media, add_special_tokens=False)
            tokens = tokens_of(made)
            return made, tokens._replace(parts=token_parts(tokens.spans, written.parts)), "messages"
        if request.tokens is not None:
            made = self.processed(self.mark * len(media), media)
            ids = [int(token) for token in request.tokens if isinstance(token, int)]
            if ids.count(-1 if self.token is None else self.token) != made["input_ids"][0].tolist().count(self.token):
                raise InvalidRequest.at(
                    "tokens", f"the number of {self.medium} tokens does not match the {self.several}"
                )
            return made | self.of_tokens(made, ids), Tokens(ids, [None] * len(ids)), "tokens"
        text = request.text if isinstance(request.text, str) else ""
        before = "" if self.mark in text else self.before * len(media)
        made = self.processed(before + text + str(request.answer or ""), media)
        tokens = tokens_of(made, len(before))
        tokens = tokens if request.answer is None else parted_answer(tokens, len(text))
        return made, tokens, "text" if request.text else self.media

    def stack(self, tokens: Tokens, shown: Sequence[str | None], **sources: Any) -> Stack:
        """The tokens of one text. ``shown``: the names of those that are parts of images or sounds, None of others.

        ``sources``: the parts that they are, by the field of ``Stack``.
        """
        named = zip(self.readable(tokens.ids), shown, strict=True)
        names = [name if own is None else own for name, own in named]
        parts = None if tokens.parts is None else [tokens.parts]
        ids = torch.tensor([tokens.ids], device=self._device)
        return Stack(ids, None, [tokens.spans], [names], parts=parts, **sources)

    def processed(self, text: str, media: Sequence[Any], **options: Any) -> dict[str, Any]:
        """The arguments of a prompt, as the processor makes them. Raises InvalidRequest."""
        options |= {self.media: list(media), "return_offsets_mapping": self._fast, **self._wanted}
        try:
            made = self._processor(text=[text], return_tensors="pt", return_text_replacement_offsets=True, **options)
        except (ValueError, TypeError, RuntimeError, IndexError, StopIteration) as fault:
            reason = str(fault).partition("\n")[0][:160]
            raise InvalidRequest.at(self.media, f"the model's processor refuses them: {reason}") from None
        return dict(made)

    def of_tokens(self, _: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """The arguments that have a number for each token, of tokens as they came."""
        return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}


def unlike_windows(places: Sequence[AttentionPlace], length: int) -> dict[str, str]:
    """Return all these layers with the reason, if one of them attends over another number of tokens than ``length``."""
    alike = all(place.length == length for place in places)
    return {} if alike else {str(place.key): _OF_WINDOWS for place in places}


def tokens_of(made: dict[str, Any], before: int = 0) -> Tokens:
    """The tokens of a prompt; their characters in the text as it came, before which so many were put."""
    ids: list[int] = made["input_ids"][0].tolist()
    offsets = made.get("offset_mapping")
    if offsets is None:
        return Tokens(ids, [None] * len(ids))
    replaced = next(iter(made.get("text_replacement_offsets") or [[]]))
    return Tokens(ids, [_span(int(a), int(b), replaced, -before) for a, b in offsets[0].tolist()])


def _span(start: int, end: int, replaced: Sequence[dict[str, Any]], origin: int) -> Span:
    """The characters of a token before images or sounds were put into the text; None for a token of one."""
    shift = origin
    for replacement in replaced:
        first, last = replacement["new_span"]
        if start >= last:
            shift = origin + replacement["span"][1] - last
        elif end > first:
            return None
    return (start + shift, end + shift) if start < end else None
