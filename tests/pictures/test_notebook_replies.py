"""Every reply of the contract in a notebook: a short text, and HTML that needs nothing else."""

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel

from attention_contract import operations
from attention_contract.operations import Operation
from attention_contract.schemas.answers import Picture
from attention_contract.short_repr import MAX_COLUMNS, MAX_LINES
from attention_pictures.notebook.notebook_replies import VIEWS

REPLIES = {each.reply for each in vars(operations).values() if isinstance(each, Operation) and each.reply is not None}
OF_MODELS = {
    each.reply
    for each in vars(operations).values()
    if isinstance(each, Operation) and each.reply is not None and "ran" in each.reply.model_fields
    and ("{model}" in each.path or each.path.startswith(("/v1/chat", "/v1/completions", "/v1/embeddings", "/v1/audio")))
}  # fmt: skip


def made(kind: Any, depth: int = 0) -> Any:
    """A value of an annotation: every tensor ``[2, 3, 3]``, every list with two items."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return np.ones((2, 3, 3)) if parts[0] is Any or get_origin(parts[0]) is np.ndarray else made(parts[0], depth)
    if origin in (Union, UnionType):
        return made(parts[0], depth)
    if origin is Literal:
        return parts[0]
    if origin is list:
        return [made(parts[0], depth + 1) for _ in range(2)]
    if origin is dict:
        return {made(parts[0], depth + 1): made(parts[1], depth + 1)}
    if origin is tuple:
        return tuple(made(part, depth + 1) for part in parts if part is not ...)
    if origin is np.ndarray:
        return np.ones((2, 3, 3))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if depth > 6:
            return None
        fields = {name: made(field.annotation, depth + 1) for name, field in kind.model_fields.items()}
        return kind.model_construct(**fields)
    return {str: "<b>text</b>", int: 1, float: 0.5, bool: True}.get(kind)


@pytest.mark.parametrize("kind", sorted(REPLIES - OF_MODELS, key=lambda each: each.__name__))
def test_every_reply_has_a_short_text_and_a_page(kind):
    value = made(kind)
    lines = repr(value).splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_COLUMNS + 20
    if kind in VIEWS:
        return  # its numbers have to fit together; the tests of the views make them
    shown = value._repr_html_()
    assert shown.startswith("<")
    assert "<b>" not in shown, "no text of a reply is markup"


@pytest.mark.parametrize("kind", sorted(OF_MODELS, key=lambda each: each.__name__))
def test_every_answer_of_a_whole_model_has_a_view(kind):
    assert kind in VIEWS


def test_a_small_value_is_one_line():
    from attention_contract.schemas.model_requests import LikelyToken

    assert repr(LikelyToken(token="cat", id=7, logit=1.5, probability=0.25)) == (
        "LikelyToken(token='cat', id=7, logit=1.5, probability=0.25)"
    )


@pytest.mark.parametrize(("media_type", "data"), [("image/svg+xml", b"<svg/>"), ("image/png", b"\x89PNG")])
def test_a_notebook_shows_a_picture_and_no_table_in_its_place(media_type, data):
    pytest.importorskip("IPython")
    from IPython.core.formatters import DisplayFormatter

    shown, _ = DisplayFormatter().format(Picture(media_type=media_type, data=data))
    assert shown.keys() == {media_type, "text/plain"}
