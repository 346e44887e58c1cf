"""The tokens of the parts of a text that a request names by their places."""

from collections.abc import Iterator, Sequence

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import NamedSpan
from attention_service.prompts.conversations import Conversation


def span_tokens(
    span: NamedSpan,
    param: str,
    real: range,
    spans: Sequence[tuple[int, int] | None],
    text: str | Conversation | None,
) -> list[int]:
    """The positions of the tokens of a part of a text.

    ``real``: the positions of the text's tokens, without padding. ``spans``: the characters of the token at each
    position. ``text``: that these count, None if it is not known. Raises InvalidRequest that names the field.
    """
    if span.tokens is not None:
        begin, end = span.tokens
        if end > len(real):
            raise InvalidRequest.at(f"{param}.tokens", f"the text has {len(real)} tokens; expected no more, got {end}")
        return [*real[begin:end]]
    field = "characters" if span.messages is None else "messages"
    if text is None:
        raise InvalidRequest.at(f"{param}.{field}", "the characters of the tokens are not known; name tokens")
    places = list(_places(span, f"{param}.{field}", text))
    tokens = [at for at in real if (own := spans[at]) is not None and any(a < own[1] <= b for a, b in places)]
    if not tokens:
        raise InvalidRequest.at(f"{param}.{field}", "no token ends in it; name a longer part")
    return tokens


def _places(span: NamedSpan, param: str, text: str | Conversation) -> Iterator[tuple[int, int]]:
    """Yield first and last (exclusive) characters of the part."""
    if span.characters is not None:
        length = len(text if isinstance(text, str) else text.text)
        if span.characters[1] > length:
            raise InvalidRequest.at(
                param, f"the text has {length} characters; expected no more, got {span.characters[1]}"
            )
        yield span.characters
    for message in span.messages or ():
        if isinstance(text, str):
            raise InvalidRequest.at(param, "the request has no messages; name characters or tokens")
        parts = [part[:2] for part, number in zip(text.parts, text.numbers, strict=True) if number == message]
        if not parts:
            raise InvalidRequest.at(param, f"no text of a message {message} is in the conversation")
        yield from parts
