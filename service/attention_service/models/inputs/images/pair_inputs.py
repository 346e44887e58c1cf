"""The input of a pair of encoders, one of texts and one of images, such as CLIP and SigLIP: either, or both at once."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import ModelInput
from attention_service.models.inputs.images.encoder_inputs import EncoderInputs
from attention_service.models.inputs.input_stacks import Inputs, SizedImage, Stack, Tokens
from attention_service.models.inputs.model_inputs import TextInputs
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.run_records import RunRecord

_OF_TEXT: Final = frozenset({"input_ids", "attention_mask", "position_ids"})
_WHOLE: Final = frozenset({"siglip", "siglip2"})
"""Model types whose texts are filled up to all positions: the vector is the state of the last one. They attend to the
padding as they did in training. Source: Zhai et al. 2023."""


class PairInputs(TextInputs):
    """Reads the texts and images of one pair."""

    media = "images"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, processor: Any) -> None:
        """``processor``: the checkpoint's image processor. Raises InvalidCheckpoint without one."""
        super().__init__(model, tokenizer)
        self.template = None
        self.images = EncoderInputs(model, processor)
        self.edge = self.images.edge
        self._fills = self.max_length if model.config.model_type in _WHOLE else None
        """The tokens of every text; None for those that have their own length."""
        config = model.config
        self.vector_width = int(getattr(config, "projection_dim", None) or config.text_config.projection_size)
        self.short_text = self._fills or self.short_text
        own: Any = getattr(tokenizer, "pad_token_id", None)
        if self._fills is not None and self.knows(own):
            self._pad = int(own)

    @property
    def takes(self) -> list[str]:
        """The inputs that requests may have."""
        return [*super().takes, "images"]

    def short_runs(self) -> list[dict[str, Tensor]]:
        """The arguments of a run over a few tokens, and of one over a gray image."""
        return [*super().short_runs(), *self.images.short_runs()]

    def find_parts(
        self, places: Sequence[AttentionPlace], run: Callable[..., Any], record: RunRecord
    ) -> dict[str, str]:
        """Find the tokens that are patches. See ``InputReader.find_parts``."""
        return self.images.find_parts(places, run, record)

    def embedder(self, model: PreTrainedModel) -> Any:
        """The half that reads texts."""
        halves: Any = model
        return halves.text_model

    def asks_two_vectors(self, request: ModelInput) -> bool:
        """True for a text and an image."""
        return bool(request.images and (request.text or request.tokens))

    def module(self, model: PreTrainedModel, arguments: Mapping[str, Tensor]) -> Callable[..., Any]:
        """The half that reads these arguments, or both, one after the other."""
        halves: Any = model
        if "pixel_values" not in arguments:
            return halves.get_text_features  # type: ignore[no-any-return]
        if "input_ids" not in arguments:
            return halves.get_image_features  # type: ignore[no-any-return]

        def both(**options: Any) -> Any:
            pixels = {name: x for name, x in options.items() if name not in _OF_TEXT}
            texts = {name: x for name, x in options.items() if name in _OF_TEXT or name not in arguments}
            text, image = halves.get_text_features(**texts), halves.get_image_features(**pixels)
            return SimpleNamespace(text=text, image=image, last_hidden_state=text.last_hidden_state)

        return both

    def absent(self, inputs: Inputs) -> str | None:
        """The tokens that an input does not have, as queries of a layer are named; None if it has all."""
        return {"pixel_values": "media", "input_ids": "text"}.get(
            next((name for name in ("pixel_values", "input_ids") if name not in inputs.arguments), "")
        )

    def read(self, request: ModelInput) -> Inputs:
        """Read the text, the images, or both. Raises InvalidRequest that names the field at fault."""
        for field in ("messages", "target", "text_pair", "answer", "audio"):
            if getattr(request, field):
                raise InvalidRequest.at(field, "this model reads texts and images alone")
        if not request.images:
            return super().read(request)
        if request.text is None and request.tokens is None:
            return self.images.read(request)
        text = super().read(request.model_copy(update={"images": []}))
        image = self.images.read(request.model_copy(update={"text": None, "tokens": None}))
        return Inputs(text.several, text.text, None, text.arguments | image.arguments, image.text)

    def batch(self, texts: Sequence[Tokens]) -> Stack:
        """Pad texts to one batch, or to all positions of the model."""
        if self._fills is not None:
            texts = [self._filled_up(text, self._fills - len(text.ids)) for text in texts]
        return super().batch(texts)

    def _filled_up(self, text: Tokens, missing: int) -> Tokens:
        return text._replace(ids=text.ids + [self._pad] * missing, spans=text.spans + [None] * missing)

    def sized(self, width: int, height: int) -> SizedImage:
        """Return the tokens of an image of this size, none of which is in the text. Raises InvalidRequest."""
        return self.images.sized(width, height)._replace(text=0)
