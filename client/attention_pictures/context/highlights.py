"""A prompt in pieces, each with the strength that a source has for one sentence of the answer, or for all of it."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention_contract.schemas.analyses.context import ContextReply

TITLES: Final[Mapping[str, str]] = {
    "hidden": "hidden: log p lost without the source's keys",
    "removed": "removed: log p lost without the source",
    "attention": "attention: share of all heads",
    "gradient": "gradient × input",
}
"""The measures in the order in which one is chosen."""


class PromptPiece(NamedTuple):
    """A part of the prompt."""

    text: str
    strength: float | None = None
    """From −1, against the sentence, to 1, for it; None for a part in no source."""
    note: str = ""
    """The name of the source, and its numbers."""


class View(NamedTuple):
    """The prompt for one sentence of the answer."""

    heading: str
    pieces: list[PromptPiece]


def values_of(reply: ContextReply) -> dict[str, NDArray[np.float64]]:
    """Return the measures ``[S, A]`` of a reply by name: ablations as what is lost, so that more is more needed."""
    ablation = reply.ablation
    measures = {
        "hidden": None if ablation is None else ablation.hidden,
        "removed": None if ablation is None else ablation.removed,
        "attention": reply.attention,
        "gradient": reply.gradient,
    }
    lost = {"hidden": -1.0, "removed": -1.0}
    return {
        name: np.asarray(value, np.float64) * lost.get(name, 1.0)
        for name, value in measures.items()
        if value is not None
    }


def chosen_measure(reply: ContextReply, measure: str | None = None) -> str:
    """Return the measure to show: the one named, or the first of ``TITLES`` that the reply has. Raises ValueError."""
    known = [*values_of(reply)]
    if measure is None and known:
        return known[0]
    if measure not in known:
        raise ValueError(
            f"expected one of the reply's measures, {', '.join(known) or 'of which it has none'}; got {measure}"
        )
    return measure


def whole(measure: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a measure ``[S]`` of the whole answer: the sum over its sentences, or of attention their mean."""
    of_answer: NDArray[np.float64] = values.mean(1) if measure == "attention" else values.sum(1)
    return of_answer


def views(reply: ContextReply, measure: str) -> list[View]:
    """Return the prompt for the whole answer, and for each sentence of it if there are several."""
    values = values_of(reply)
    names = [token.text for token in reply.answer]
    prompts = [
        View(reply.answer_text.strip(), _pieces(reply, {name: whole(name, x) for name, x in values.items()}, measure))
    ]
    if len(names) > 1:
        prompts += [
            View(name, _pieces(reply, {key: x[:, at] for key, x in values.items()}, measure))
            for at, name in enumerate(names)
        ]
    return prompts


def _pieces(reply: ContextReply, values: Mapping[str, NDArray[np.float64]], measure: str) -> list[PromptPiece]:
    strongest = float(np.abs(values[measure]).max(initial=0.0)) or 1.0
    pieces, at = [], 0
    for index, source in enumerate(reply.sources):
        begin, end = source.span
        if begin > at:
            pieces.append(PromptPiece(reply.prompt[at:begin]))
        numbers = ", ".join(f"{name} {x[index]:+.3g}" for name, x in values.items())
        strength = float(values[measure][index]) / strongest
        pieces.append(PromptPiece(reply.prompt[begin:end], strength, f"{source.name}: {numbers}"))
        at = end
    return [*pieces, PromptPiece(reply.prompt[at:])] if at < len(reply.prompt) else pieces
