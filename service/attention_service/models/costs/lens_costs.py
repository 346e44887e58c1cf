"""The memory and the operations of reading states out as logits, beside those of the pass that makes them."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import LensPart
from attention_service.cost import Traffic
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.readout import LOGITS_AT_ONCE, check_has_unembedding
from attention_service.models.passes.attention_places import AttentionPlace

_MATRIX_COPIES: Final = 4
"""Copies of them: of the matrix, in float32, their shares, and those of the model."""
_KEPT_STATES: Final = 5
"""States of each layer that are kept at the positions that are read."""
_BY_HEAD: Final = 3
"""Copies of the contributions of the heads of one layer."""


class LensCost(NamedTuple):
    """The cost of the readings of one request."""

    readings: int
    peak_bytes: int
    """Peak memory beyond the forward pass; the reply counts twice."""
    traffic: Traffic


def read_by_place(parts: Iterable[LensPart], place: AttentionPlace) -> int:
    """The readings of one attention at one position."""
    return sum(place.widths.heads if part == "heads" else 1 for part in set(parts))


def lens_cost(
    loaded: LoadedModel, parts: Sequence[LensPart], places: Sequence[AttentionPlace], positions: int, *,
    top_k: int = 5, targets: int = 0, matrices: bool = False,
) -> LensCost:  # fmt: skip
    """The cost of reading parts of layers at so many positions of all texts together.

    ``matrices``: each state goes through the matrix of a fitted lens first.
    """
    width, vocabulary = int(loaded.model.config.get_text_config().hidden_size), loaded.reader.predictable
    itemsize = loaded.model.dtype.itemsize
    heads = max((place.widths.heads for place in places), default=0)
    readings = positions * sum(read_by_place(parts, place) for place in places)
    states = 4 * positions * width * (_KEPT_STATES * (len(places) + 1) + _BY_HEAD * heads)
    at_once = min(LOGITS_AT_ONCE + vocabulary, positions * max(1, heads) * vocabulary)
    reply = readings * (20 * top_k + 8 * targets + 8)
    products = 2 * readings * width * (vocabulary if top_k or "hidden" in parts else targets)
    if "heads" in parts:
        products += 2 * positions * sum(place.widths.heads * place.widths.value_dim * width for place in places)
    if matrices:
        products += 2 * readings * width * width
        states += 3 * 4 * width * width
    blocks = -(-readings * vocabulary // LOGITS_AT_ONCE)
    logits = 4 * readings * vocabulary
    traffic = Traffic(
        blocks * vocabulary * width * itemsize + 3 * logits, logits, operations=8 * (len(places) + blocks),
        products=products, half_products=products if itemsize == 2 else 0,
    )  # fmt: skip
    return LensCost(readings, states + _MATRIX_COPIES * 4 * at_once + 2 * reply, traffic)


def check_predicts_next(loaded: LoadedModel, param: str) -> None:
    """Raise InvalidRequest for a model that does not predict the next token: no Jacobian lens is fitted to it."""
    check_has_unembedding(loaded, param)
    if loaded.head.predicts != "next":
        name = type(loaded.model).__name__
        raise InvalidRequest.at(
            param, f"{name} does not predict the next token; a Jacobian lens is the mean over the tokens that follow"
        )
