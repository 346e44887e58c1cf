"""The rows, columns and cells of a lens, for its figure and for a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import head_name
from attention_contract.schemas.analyses.lenses import LensPart, LensReading, ModelLensReply
from attention_pictures.pooled_cells import Numbers
from attention_pictures.token_labels import labels_in_place

ORDER: tuple[LensPart, ...] = ("hidden", "output", "heads")
"""The parts of a reply, the one that is drawn first."""


@dataclass(frozen=True)
class LensGrid:
    """The cells of one part of a lens: layers or heads down, tokens across."""

    part: LensPart
    rows: list[str]
    columns: list[str]
    words: list[list[str]]
    """``[rows, columns]``: the token of the largest logit; empty texts without ``top_k``."""
    values: Numbers
    """``[rows, columns]``: the numbers of the colours."""
    quantity: str
    """The name of these numbers."""
    signed: bool

    @property
    def rows_name(self) -> str:
        """The noun of a row."""
        return "head" if self.part == "heads" else "layer"


def grid_of(reply: ModelLensReply, text: int | None, labels: Sequence[str] | None = None) -> LensGrid:
    """The cells of the first part that a reply has, of one text; None for a reply about one.

    ``labels``: one for each token of the text, in place of the tokens.

    Their colours are the probabilities of hidden states; of contributions the logit of the first target, or the
    difference of two, and without targets the largest logit. Raises InvalidRequest for a reply without readings, and
    for another number of labels.
    """
    part = next((part for part in ORDER if any(getattr(layer, part) is not None for layer in reply.layers)), None)
    if part is None:
        raise InvalidRequest.at("layers", "a picture of a lens needs at least one layer that has a reading")
    positions: Any = reply.positions
    places = positions if text is None else positions[text]
    tokens = labels_in_place([shown(token) for token in reply.labels_of(text or 0).tokens], labels)
    rows: list[str] = []
    words: list[list[str]] = []
    values: list[Numbers] = []
    quantity = ""
    for layer in reply.layers:
        reading: LensReading | None = getattr(layer, part)
        if reading is None:
            continue
        numbers, ids, quantity = _numbers(reply, part, reading, text)
        rows += [head_name(layer.layer, at) for at in range(len(numbers))] if part == "heads" else [str(layer.layer)]
        words += [["" if token_id is None else shown(reply.name(int(token_id))) for token_id in line] for line in ids]
        values += list(numbers)
    drawn = np.stack(values)
    return LensGrid(
        part, rows, [tokens[at] for at in places], words, drawn, quantity,
        signed=quantity != "probability" and (bool(reply.targets) or bool((drawn < 0).any())),
    )  # fmt: skip


def _numbers(reply: ModelLensReply, part: LensPart, reading: LensReading, text: int | None) -> tuple[Numbers, Any, str]:
    """The numbers of the colours and the token ids ``[rows, positions]`` of one layer, and the numbers' name."""
    top, targets = reading.top, reading.targets

    def rows(x: Any) -> Any:
        return (x if text is None else x[text])[None] if part != "heads" else x if text is None else x[text]

    of = "logit of" if part == "hidden" else "added to the logit of"
    ids: Any = None if top is None else rows(top.ids)[..., 0]
    if targets is not None and (part != "hidden" or top is None):
        numbers = rows(targets)
        if ids is None:
            ids = np.full(numbers.shape[:2], None, object)
        names = [shown(reply.name(token)) for token in reply.targets]
        if len(names) == 2:
            return numbers[..., 0] - numbers[..., 1], ids, f"{of} {names[0]} − {names[1]}"
        return numbers[..., 0], ids, f"{of} {names[0]}"
    if top is None:
        raise InvalidRequest.at("top_k", "a picture of a lens needs top_k or targets")
    if top.probabilities is not None:
        return rows(top.probabilities)[..., 0], ids, "probability"
    return rows(top.logits)[..., 0], ids, "added to the largest logit"


def shown(token: str) -> str:
    """A token without the space before it; white space as a program writes it."""
    return token.strip() or repr(token)
