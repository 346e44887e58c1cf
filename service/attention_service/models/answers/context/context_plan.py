"""A request for the sources of an answer, checked: its prompt, the tokens of each source, and its answer.

A token belongs to the part that its last character is in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.context import MAX_SENTENCES, MAX_SOURCES, ContextRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.prompts import Message
from attention_service.models.answers.context.sentence_spans import sentence_spans
from attention_service.models.answers.given_answers import check_answers
from attention_service.models.inputs.input_stacks import Inputs, Tokens
from attention_service.models.loaded.checked_request import CheckedRequest, check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.prompts.conversations import ANSWER, ChatForm

Characters = tuple[int, int]
"""First and last (exclusive) character."""


class SourceText(NamedTuple):
    """One source."""

    name: str
    span: Characters
    """In the prompt."""
    tokens: range


class Sentence(NamedTuple):
    """One sentence of an answer."""

    span: Characters
    """In the answer."""
    tokens: range
    """Among the tokens of the answer."""


@dataclass(frozen=True)
class ContextPlan:
    """A request for sources, checked."""

    prompt: str
    sources: list[SourceText]
    checked: CheckedRequest
    """The prompt, with the answer if it is known."""
    answer: str = ""
    sentences: tuple[Sentence, ...] = ()
    generated: bool = False

    @property
    def inputs(self) -> Inputs:
        """The tokens of prompt and answer."""
        return self.checked.inputs

    @property
    def answers(self) -> list[int]:
        """The indices of the tokens of the answer."""
        return self.inputs.answers[0]

    @property
    def length(self) -> int:
        """The tokens of prompt and answer."""
        return self.inputs.text.length

    @property
    def places(self) -> list[AttentionPlace]:
        """The layers that attend over the tokens of the text."""
        return self.checked.places

    def answered(self, loaded: LoadedModel, ids: Sequence[int], ends: Sequence[int], answer: str) -> "ContextPlan":
        """The plan with an answer that was generated. ``ends``: the characters of the answer up to each token.

        Raises InvalidRequest.
        """
        text = self.inputs.text
        begins = [0, *ends[:-1]]
        spans = [(a, b) if a < b else None for a, b in zip(begins, ends, strict=True)]
        before = [None if span is None else "text" for span in text.spans[0]] if text.parts is None else text.parts[0]
        tokens = Tokens(
            [*text.ids[0].tolist(), *ids], [*text.spans[0], *spans], [*before, *[ANSWER] * len(ids)]
        )  # fmt: skip
        stack = loaded.reader.batch([tokens])
        inputs = Inputs(several=False, text=stack, target=None, arguments=loaded.reader.arguments(stack))
        sentences = _sentences(answer, [max(end - 1, 0) for end in ends])
        return replace(
            self, checked=replace(self.checked, inputs=inputs), answer=answer, sentences=sentences, generated=True
        )


def plan_context(loaded: LoadedModel, request: ContextRequest) -> ContextPlan:
    """Check a request, and find its sources. Raises InvalidRequest that names the field at fault."""
    reader = loaded.reader
    if reader.pairs:
        raise InvalidRequest.at(
            "model",
            f"{type(loaded.model).__name__} reads the prompt by an encoder; take a decoder, or ask gradients with "
            "the answer as target",
        )
    if "text" not in reader.takes:
        field = next((name for name in ("text", "messages") if getattr(request, name) is not None), "sources")
        raise InvalidRequest.at(field, f"{reader.no_tokenizer}, and sources are parts of a text")
    if reader.tokenizer is None or not reader.tokenizer.is_fast:
        raise InvalidRequest.at("model", "its tokenizer does not say which characters a token has")
    if loaded.head.predicts != "next":
        raise InvalidRequest.at("model", f"{type(loaded.model).__name__} does not predict the tokens of an answer")
    read = _read_text(loaded, request) if request.messages is None else _read_messages(loaded, request)
    text = read.checked.inputs.text
    answers = read.checked.inputs.answers[0]
    first = answers[0] if answers else text.length
    ends = [None if span is None else span[1] - 1 for span in text.spans[0][:first]]
    sources: list[SourceText] = []
    for index, (name, span, param) in enumerate(_parts(read, request)):
        tokens = [at for at, end in enumerate(ends) if end is not None and span[0] <= end < span[1]]
        if not tokens:
            raise InvalidRequest.at(param, "no token ends in it; name a longer part of the prompt")
        if sources and tokens[0] < sources[-1].tokens.stop:
            raise InvalidRequest.at(param, f"it begins before source {index - 1} ends; sources do not overlap")
        sources.append(SourceText(name, span, range(tokens[0], tokens[-1] + 1)))
    if not sources:
        raise InvalidRequest.at("split", "the prompt has no sentences; name sources")
    if len(sources) > MAX_SOURCES:
        raise InvalidRequest.at(
            "split", f"the prompt has {len(sources)} parts; name at most {MAX_SOURCES} sources", limit=MAX_SOURCES
        )
    places = [place for place in read.checked.places if place.queries == "text" and place.mixes == "attention"]
    plan = ContextPlan(read.prompt, sources, replace(read.checked, places=places))
    if read.answer is not None:
        check_answers(loaded, plan.inputs, "answer" if request.messages is None or request.answer else "messages")
        lasts = [None if span is None else span[1] - 1 - read.begin for span in text.spans[0]]
        plan = replace(plan, answer=read.answer, sentences=_sentences(read.answer, [lasts[at] for at in answers]))
    _check_measures(loaded, request, plan)
    return plan


class _ReadPrompt(NamedTuple):
    """A prompt as the model reads it."""

    prompt: str
    parts: list[tuple[int, int, str]]
    """The contents of its messages, by their characters and roles; of a text all of it."""
    checked: CheckedRequest
    answer: str | None = None
    begin: int = 0
    """The first character of the answer, among those that the spans of its tokens count."""


def _read_text(loaded: LoadedModel, request: ContextRequest) -> _ReadPrompt:
    text = request.text or "".join(source.text or "" for source in request.sources or ())
    checked = check_request(loaded, ModelForwardRequest(text=text, answer=request.answer))
    return _ReadPrompt(text, [(0, len(text), "")], checked, request.answer)


def _read_messages(loaded: LoadedModel, request: ContextRequest) -> _ReadPrompt:
    messages = list(request.messages or ())
    if request.answer is not None:
        messages.append(Message(role="assistant", content=request.answer))
    given = ModelForwardRequest(messages=messages, chat_template_kwargs=request.chat_template_kwargs)
    if given.all_images or given.all_audio:
        raise InvalidRequest.at("messages", "sources are parts of a text; leave images and sounds out")
    checked = check_request(loaded, given)
    written = loaded.reader.conversation(messages, ChatForm.of(given), parted=True)
    own = [part for part in written.parts if part[2] == ANSWER]
    if not own:
        return _ReadPrompt(written.text, written.parts, checked)
    begin, end = own[0][0], own[-1][1]
    parts = [part for part in written.parts if part[2] != ANSWER]
    return _ReadPrompt(written.text[:begin], parts, checked, written.text[begin:end], begin)


def _parts(read: _ReadPrompt, request: ContextRequest) -> list[tuple[str, Characters, str]]:
    """The name and the characters of each source, and the field that names it. Raises InvalidRequest."""
    prompt = read.prompt
    if request.sources is None:
        if request.split == "messages":
            return [(f"{role} {at}", (a, b), "split") for at, (a, b, role) in enumerate(read.parts, 1)]
        spans = [(begin + a, begin + b) for begin, end, _ in read.parts for a, b in sentence_spans(prompt[begin:end])]
        return [(f"sentence {at}", span, "split") for at, span in enumerate(spans, 1)]
    parts: list[tuple[str, Characters, str]] = []
    at = 0
    for index, source in enumerate(request.sources):
        param = f"sources.{index}"
        if source.text is not None:
            begin = prompt.find(source.text, at)
            span = begin, begin + len(source.text)
            if begin < 0:
                raise InvalidRequest.at(
                    f"{param}.text", "expected a part of the prompt behind the source before; not found"
                )
        else:
            span = source.span or (0, 0)
            if span[1] > len(prompt):
                raise InvalidRequest.at(
                    f"{param}.span",
                    f"{span[1]} is out of range; the prompt has {len(prompt)} characters",
                    limit=len(prompt),
                )
        at = max(at, span[1])
        parts.append((source.name or f"source {index + 1}", span, param))
    return parts


def _sentences(answer: str, lasts: Sequence[int | None]) -> tuple[Sentence, ...]:
    """The sentences of an answer that have tokens; ``lasts``: the last character of each token.

    A token behind the end of a sentence belongs to the next one, and the last one has all that follow.
    """
    spans = sentence_spans(answer) or [(0, len(answer))]
    if len(spans) > MAX_SENTENCES:
        spans = [*spans[: MAX_SENTENCES - 1], (spans[MAX_SENTENCES - 1][0], spans[-1][1])]
    sentences: list[Sentence] = []
    first = at = 0
    for number, span in enumerate(spans):
        while at < len(lasts) and (number == len(spans) - 1 or (lasts[at] or 0) < span[1]):
            at += 1
        if at > first:
            sentences.append(Sentence(span, range(first, at)))
        first = at
    return tuple(sentences)


def _check_measures(loaded: LoadedModel, request: ContextRequest, plan: ContextPlan) -> None:
    """Raise InvalidRequest for a measure that the model has not."""
    wanted: dict[Any, str] = {name: f"return.{index}" for index, name in enumerate(request.return_)}
    for name in ("attention", "lookback"):
        if name in wanted and not any(place.taps is None or "weights" in place.taps for place in plan.places):
            why = "no layer shows the weights of a text" if loaded.places else loaded.without_attention
            raise InvalidRequest.at(wanted[name], f"{why}; leave {name} out of return")
    if request.chooses_heads and not loaded.places:
        raise InvalidRequest.at("heads", f"{loaded.without_attention}; leave heads out")
    if "hidden" in wanted:
        for place in plan.places:
            if place.keys != "text" or place.keys_of != "tokens":
                raise InvalidRequest.at(
                    wanted["hidden"],
                    f"the keys of layer {place.key} are those of {place.keys_of}, which cannot be hidden one by one; "
                    "leave hidden out of return, or take removed",
                )
            if place.taps is not None:
                loaded.runner.check_tap(place, "weights", "edit", wanted["hidden"])
        others = {place.mixes for place in loaded.implicit.values()}
        if unseen := [*model_info(loaded)["unseen"], *sorted(others)]:
            raise InvalidRequest.at(
                wanted["hidden"],
                f"its layers {', '.join(unseen)} read a text without keys that could be hidden; leave hidden out of "
                "return, or take removed",
            )
    if "removed" in wanted:
        before = plan.answers[0] if plan.answers else plan.length
        for index, source in enumerate(plan.sources):
            if len(source.tokens) >= before:
                raise InvalidRequest.at(
                    wanted["removed"], f"without source {index} no token stands before the answer; name smaller sources"
                )
