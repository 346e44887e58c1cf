"""The cosine of the vectors of texts and images in the space of a pair of encoders, and its gradient by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import ImageBytes, ModelInput
from attention_contract.schemas.text_similarity import TextSimilarityReply, TextSimilarityRequest
from attention_service.core.cancellation import checkpoint
from attention_service.models.inputs.images.image_decoding import decoding_bytes
from attention_service.models.inputs.input_stacks import Inputs
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_ran
from attention_service.models.loaded.model_runner import RunSpec
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.points import EMBEDDINGS


@dataclass(frozen=True)
class PairSimilarity:
    """A request for similarities to a pair of encoders, checked."""

    texts: Inputs | None
    """All texts, in their order; None without any."""
    images: Inputs | None

    @property
    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The number of texts and their tokens, and the number of images and theirs."""
        return _shape(self.texts), _shape(self.images)


def _shape(inputs: Inputs | None) -> tuple[int, int]:
    return (0, 0) if inputs is None else (len(inputs.text.ids), inputs.text.length)


def images_of(request: TextSimilarityRequest) -> list[ImageBytes]:
    """The images of a request, in their order."""
    return [side for pair in request.pairs for side in pair if isinstance(side, ImageBytes)]


def image_bytes(loaded: LoadedModel, request: TextSimilarityRequest) -> int:
    """Estimate the memory that decoding its images takes. Raises InvalidRequest that names the one at fault."""
    try:
        return decoding_bytes(images_of(request), loaded.reader.edge)
    except InvalidRequest as fault:
        raise _named(fault, [side for side, kind in _places(request) if kind == "images"]) from None


def plan_pair_similarity(loaded: LoadedModel, request: TextSimilarityRequest) -> PairSimilarity:
    """Check a request, and decode its images. Raises InvalidRequest that names the field at fault."""
    for field in ("prompt_names", "pooling"):
        if getattr(request, field) is not None:
            raise InvalidRequest.at(field, "the vectors of a pair of encoders have no prompts and no other pooling")
    reader, places = loaded.reader, _places(request)
    texts, images = ([side for side, kind in places if kind == name] for name in ("text", "images"))
    read: dict[str, Inputs | None] = dict.fromkeys(("text", "images"))
    for name, sides in (("text", texts), ("images", images)):
        if sides:
            try:
                read[name] = reader.read(ModelInput.model_construct(**_input(request, name, sides)))
            except InvalidRequest as fault:
                raise _named(fault, sides) from None
    return PairSimilarity(read["text"], read["images"])


def pair_similarity_reply(
    loaded: LoadedModel, request: TextSimilarityRequest, planned: PairSimilarity
) -> TextSimilarityReply:
    """Return the cosine of each pair, and the share of each token and patch in it."""
    attention_pass, shares = AttentionPass({}), request.gradients
    vectors: dict[str, Tensor] = {}
    embedded: dict[str, Tensor] = {}
    with torch.set_grad_enabled(shares):
        for name, inputs in (("text", planned.texts), ("images", planned.images)):
            if inputs is None:
                continue
            checkpoint()
            run = loaded.runner.run(inputs.arguments, RunSpec(attention_pass, keep=[EMBEDDINGS] if shares else []))
            vectors[name] = run.output.pooler_output
            if shares:
                embedded[name] = run.at[EMBEDDINGS]
        numbered = {"text": 0, "images": 0}
        sides = list[tuple[str, int]]()
        for _, kind in _places(request):
            sides.append((kind, numbered[kind]))
            numbered[kind] += 1
        chosen = torch.stack([vectors[kind][number] for kind, number in sides])
        cosine = torch.nn.functional.cosine_similarity(chosen[::2], chosen[1::2], dim=-1)
    labels = {
        name: loaded.reader.labels(inputs.text)
        for name, inputs in (("text", planned.texts), ("images", planned.images))
        if inputs is not None
    }
    fields: dict[str, Any] = {
        "similarity": cosine.tolist(), "labels": _by_pair([labels[kind][number] for kind, number in sides]),
    }  # fmt: skip
    if shares:
        gradients = torch.autograd.grad(cosine.sum(), [*embedded.values()])
        parts = {
            name: (gradient * embedded[name]).sum(-1).tolist()
            for name, gradient in zip(embedded, gradients, strict=True)
        }
        fields["tokens"] = _by_pair([parts[kind][number] for kind, number in sides])
    return valid(TextSimilarityReply, fields | {"ran": model_ran(loaded, attention_pass, loaded.adapters.active)})


def _places(request: TextSimilarityRequest) -> list[tuple[str, str]]:
    """The place of each side of all pairs in the request, and the input that it is."""
    return [
        (f"pairs.{index}.{number}", "images" if isinstance(side, ImageBytes) else "text")
        for index, pair in enumerate(request.pairs)
        for number, side in enumerate(pair)
    ]


def _input(request: TextSimilarityRequest, name: str, sides: Sequence[str]) -> dict[str, Any]:
    chosen = [request.pairs[int(side.split(".")[1])][int(side.split(".")[2])] for side in sides]
    return {"text": chosen} if name == "text" else {"images": chosen}


def _named(fault: InvalidRequest, sides: Sequence[str]) -> InvalidRequest:
    """The error of a side by its place in the request."""
    number = str(fault.param or "").rpartition(".")[2]
    place = sides[int(number)] if number.isdecimal() and int(number) < len(sides) else sides[0]
    return InvalidRequest(fault.detail.replace(f"{fault.param}: ", ""), param=place, **fault.facts)


def _by_pair(of_sides: Sequence[Any]) -> list[list[Any]]:
    return [[*pair] for pair in zip(of_sides[::2], of_sides[1::2], strict=True)]


def is_pair(loaded: LoadedModel) -> bool:
    """True for a model of an encoder of texts and one of images in one space."""
    return loaded.reader.vector_width is not None
