"""The sizes of a whole model that the costs of its passes depend on."""

from collections.abc import Collection
from functools import cached_property
from typing import Any, Final

from torch import Tensor, nn

from attention_service.core.blocks import scores_at_once
from attention_service.models.costs.image_costs import ImageCosts
from attention_service.models.costs.implicit_costs import shown_places
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.matrix_products import linear_matrices
from attention_service.models.passes.attention_places import TARGET, kinds_of

_TILES: Final = 8 * 4
"""Bytes of a tile in which weights are inspected, for each of its scores."""
_STATES_AT_ONCE: Final = 12
"""Tensors as wide as the hidden states that one layer holds at once."""
_INNER: Final = 4
"""The same as wide as the widest matrix."""
_KEPT_STATES: Final = 16
"""Tensors as wide as the hidden states that the graph keeps of each layer."""


class ModelSizes:
    """Widths, matrices and layers of one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        model = loaded.model
        vision = getattr(model.config, "vision_config", None)
        self.images = ImageCosts(loaded)
        encodes, every = self.images.encodes, [*loaded.places.values()]
        config = vision if encodes and vision is not None else model.config.get_text_config()
        self.width = int(config.hidden_size)
        """Numbers of a hidden state."""
        known = int(getattr(config, "vocab_size", 0) or loaded.reader.vocabulary)
        self.vocabulary = len(loaded.head.classes) or known
        self.itemsize = model.dtype.itemsize
        self.tile_bytes = _TILES * scores_at_once(gpu=loaded.device.is_cuda)
        self.parameters = [*model.parameters()]
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.head = 0 if head is None else head.weight.numel()
        """Numbers of the prediction head's matrix."""
        self.inner = max((max(matrix.shape) for matrix in _weights(model, [head])), default=self.width)
        """The longest side of a matrix."""
        self.of_images = [] if encodes else self.images.places
        """Layers that see images, in a model that reads text too."""
        self.places = [place for place in every if place not in self.of_images]
        """Its other attentions."""
        self.implicit = shown_places(loaded)
        """Its layers with implicit weights."""
        self.layers = len(self.places) + len(loaded.implicit)
        self.kinds = [kind for kind, _ in kinds_of(self.places)]
        """One layer of each kind."""
        self.most_heads = max((place.widths.heads for place in self.places), default=0)
        if self.places and self.places[0].windows is not None:  # its layers have fewer tokens the wider they are
            first = self.places[0].output_width
            self.inner, self.width = -(-self.inner * first // self.width), first
        self.image_width = self.width if encodes else int(getattr(vision, "hidden_size", 0))
        self.matrices = 0 if encodes else _matrices(model, [head, *self.images.modules], config)
        """Numbers that each token is multiplied by."""
        pairs = loaded.reader.pairs
        self.target_matrices = _of_target(loaded, head) if pairs else 0
        """The part of these by which a decoder beside an encoder multiplies each token of a target."""
        self.layers_of_target = sum(place.queries == "target" for place in self.places) if pairs else 0
        self.layers_of_text = self.layers - self.layers_of_target
        self.rows_alone = "logits_to_keep" in loaded.reader.names
        """True if the model computes logits of wanted rows alone."""
        self.layer_numbers = _STATES_AT_ONCE * self.width + _INNER * self.inner
        """Numbers of each token that one layer holds at once."""
        self.kept_numbers = _KEPT_STATES * self.width + _INNER * self.inner
        """Numbers of each token that the graph keeps of one layer."""
        self.image_numbers = _STATES_AT_ONCE * self.image_width + _INNER * self.inner
        """The same as ``layer_numbers`` of a layer that sees images."""
        self.kept_image_numbers = _KEPT_STATES * self.image_width + _INNER * self.inner
        """The same as ``kept_numbers`` of a layer that sees images."""

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)


def _weights(model: nn.Module, without: Collection[nn.Module | None]) -> list[Tensor]:
    """The matrices by which a model multiplies its states."""
    left_out = {id(left) for left in without}
    return linear_matrices(module for module in model.modules() if id(module) not in left_out)


def _matrices(model: nn.Module, without: Collection[nn.Module | None], config: Any) -> int:
    """The numbers that each token is multiplied by: of experts, of those that a token visits."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    visited = getattr(config, "num_experts_per_tok", None) or experts
    stacked = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 3 and len(parameter) > 1)
    single = sum(matrix.numel() for matrix in _weights(model, without))
    return single + stacked * int(visited) // int(experts)


def _of_target(loaded: LoadedModel, head: nn.Module | None) -> int:
    """The numbers of the matrices that have as many rows in the short run as its target has tokens."""
    products = loaded.short_products
    sizes = {module: matrix.numel() for module in products for matrix in linear_matrices([module])}
    return sum(size for module, size in sizes.items() if module is not head and products[module] == 2 * size * TARGET)
