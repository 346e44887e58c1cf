"""The attention of a model on this machine, by its own eager functions: its taps are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_client.array_likes import as_array
from attention_client.transformers.attached import attending_by
from attention_client.transformers.local_attention import local_attention
from attention_contract.tensors import Array
from attention_transformers.model_layers import LayerKey, attention_modules


@contextmanager
def local_taps(model: PreTrainedModel) -> Iterator[dict[LayerKey, dict[str, Array]]]:
    """Yield a dict that each pass fills with q, k, v, weights and context by layer, with their batch dimension.

    The model attends by its own eager functions until the block ends. Raises UnsupportedModel for a model that does not
    use the attention interface of transformers.
    """
    modules = attention_modules(model)
    taps: dict[LayerKey, dict[str, Array]] = {}
    keys = {id(one.module): one.keys for one in modules}
    functions = {id(one.module): local_attention(one.module, "eager") for one in modules}
    calls: dict[int, int] = {}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        place = id(module)
        calls[place] = calls.get(place, -1) + 1
        layer = keys[place][calls[place] % len(keys[place])]
        output, weights = functions[place](module, query, key, value, mask, *args, **options)
        found = {"q": query, "k": key, "v": value, "weights": weights, "context": output.transpose(1, 2)}
        taps[layer] = {tap: as_array(tensor) for tap, tensor in found.items() if tensor is not None}
        return output, weights

    with attending_by(model, attend):
        yield taps
