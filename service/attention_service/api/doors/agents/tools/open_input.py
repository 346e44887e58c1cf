"""``open_input``: a text or an image for a model, under a handle that every other tool takes."""

from itertools import groupby
from typing import Any, Final

from pydantic import Field, model_validator

from attention_contract.base import WireModel, at_fault
from attention_contract.errors import ModelNotFound
from attention_contract.operations import get_model, list_models, model_forward
from attention_contract.schemas.models import ModelLayer, ModelName
from attention_contract.schemas.prompts import Text
from attention_service.api.doors.agents.agent_tool import (
    AgentTool,
    ToolAnswer,
    ToolArguments,
    ToolContext,
    ToolResult,
    number,
)
from attention_service.api.doors.agents.opened_inputs import listing

_LISTED_TOKENS: Final = {"concise": 48, "detailed": 512}
_PREDICTED: Final = {"concise": 3, "detailed": 10}


class OpenInputArguments(ToolArguments):
    """A text, an image, or a text about an image, for one model."""

    model: ModelName = "tiny"
    """The model that reads it. tiny ships with the server; a wrong name is answered with those that there are."""
    text: Text | None = None
    image: str | None = Field(default=None, min_length=1, max_length=2**24)
    """The bytes of a PNG, JPEG, WebP or GIF file in base64, for models that read images."""
    target: Text | None = None
    """The decoder's text, of a model with an encoder and a decoder."""

    @model_validator(mode="after")
    def _something(self) -> "OpenInputArguments":
        if self.text is None and self.image is None:
            raise at_fault("text", "expected a text or an image; got none")
        return self

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request that are the input."""
        images = [] if self.image is None else [{"base64": self.image}]
        given = {"text": self.text, "target": self.target, "images": images or None}
        return {name: value for name, value in given.items() if value is not None}


class LayerRange(WireModel):
    """Layers that follow each other and have as many heads."""

    layers: str
    """The first and the last, as in ``0 to 11``."""
    heads: int


class PredictedToken(WireModel):
    """One token that the model may put at the end of the input."""

    token: str
    probability: float


class OpenedAnswer(ToolAnswer):
    """An input that is open."""

    input: str
    """The handle. Give it to the other tools; it names this model and this input."""
    model: str
    architecture: str
    token_count: int
    tokens: list[str]
    """The tokens by position, from 0; the first ones of a long input."""
    layers: list[LayerRange]
    predicted: list[PredictedToken]
    """The likeliest predictions after the last token, or the likeliest classes of an image."""


async def open_input(call: ToolContext, arguments: OpenInputArguments) -> ToolResult:
    """Open a text or an image for a model and get the handle that all other tools take as `input`.

    Begin here. The answer has the tokens by position, the layers and heads, and what the model predicts. Opening the
    same input again gives the same handle. Concise: 48 tokens and 3 predictions; detailed: 512 and 10.
    """
    model, fields = arguments.model, arguments.fields()
    try:
        info = await call.requests.ask(get_model, model=model)
        question = fields | listing(info.predicts, _PREDICTED[arguments.detail])
        reply = await call.requests.ask(model_forward, question, model=model)
    except ModelNotFound as error:
        known = [listed.id for listed in (await call.requests.ask(list_models)).data if listed.refused is None]
        error.detail += f". Call open_input with model one of: {', '.join(known[:20])}"
        raise
    if not info.layers:  # which are told once it is loaded
        info = await call.requests.ask(get_model, model=model)
    labels = reply.labels_of()
    handle = call.inputs.keep(call.caller, model, fields, labels.tokens, labels.ids, reply.predicts)
    last = reply.predictions[-1].top if reply.predictions else []
    predicted = [PredictedToken(token=top.token, probability=number(top.probability)) for top in last]
    likeliest = f", and predicts {predicted[0].token!r} ({predicted[0].probability:g})" if predicted else ""
    answer = OpenedAnswer(
        summary=f"{model} reads {len(labels.tokens)} tokens{likeliest}.",
        input=handle,
        model=model,
        architecture=reply.ran.architecture,
        token_count=len(labels.tokens),
        tokens=labels.tokens[: _LISTED_TOKENS[arguments.detail]],
        layers=list(_ranges(info.layers)),
        predicted=predicted,
    )
    return ToolResult(answer)


def _ranges(layers: list[ModelLayer]) -> Any:
    """Yield the layers in ranges of as many heads and of one stack."""
    for (_, heads), members in groupby(layers, lambda layer: (str(layer.layer).rpartition(".")[0], layer.heads)):
        names = [str(layer.layer) for layer in members]
        yield LayerRange(layers=names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", heads=heads)


TOOL: Final = AgentTool(
    "Open a text or an image",
    OpenInputArguments,
    OpenedAnswer,
    open_input,
    {"images": "image", "images.base64": "image"},
)
