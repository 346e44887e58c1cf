"""One vector a text: the hidden states behind a model's last layer, pooled as its checkpoint says.

A checkpoint of sentence-transformers says so in ``modules.json`` and in the config of its pooling. Without one, the
vector of an encoder is the mean over its tokens, that of a decoder the state of its last token, of length 1.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.openai import Embedding, EmbeddingRequest, Embeddings, Usage
from attention_service.core.cancellation import checkpoint
from attention_service.runtime.models.generation_plan import STATES, prompt_tokens
from attention_service.runtime.models.loaded_model import LoadedModel
from attention_service.runtime.models.model_inputs import Tokens

_MODES: Final = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}  # fmt: skip
_KINDS: Final[dict[type, str]] = {list: "JSON list", dict: "JSON object"}


@dataclass(frozen=True)
class Pooling:
    """The way from hidden states to one vector."""

    mode: str
    """``mean``, ``cls``, ``max`` or ``last``."""
    normalizes: bool

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self:
        """Read it from the checkpoint. Raises InvalidCheckpoint for one that pools in another way."""
        folder = Path(str(loaded.model.name_or_path))
        if not (folder / "modules.json").is_file():
            decodes = loaded.predicts == "next" and not loaded.reader.pairs
            return cls("last" if decodes else "mean", normalizes=True)
        modules = _read(folder, "modules.json", list)
        if not all(isinstance(each, dict) for each in modules):
            raise InvalidCheckpoint.at("model", "modules.json of its pooling is not a list of objects")
        kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
        if unknown := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
            raise InvalidCheckpoint.at(
                "model", f"its embeddings pass {', '.join(sorted(unknown))}, which is not supported"
            )
        modes = []
        for kind, each in zip(kinds, modules, strict=True):
            if kind == "Pooling":
                config = _read(folder, f"{each.get('path', '')}/config.json", dict)
                modes += [config["pooling_mode"]] if "pooling_mode" in config else []
                modes += [mode for name, mode in _MODES.items() if config.get(name)]
        if len({*map(str, modes)}) != 1 or modes[0] not in _MODES.values():
            raise InvalidCheckpoint.at("model", f"expected a pooling of {', '.join(_MODES.values())}; got {modes}")
        return cls(modes[0], normalizes="Normalize" in kinds)

    def pooled(self, states: Tensor, mask: Tensor) -> Tensor:
        """The vectors ``[B, d_model]`` of states ``[B, L, d_model]``, ``mask [B, L]`` true for real tokens."""
        states, real = states.float(), mask[..., None]
        if self.mode == "mean":
            found = (states * real).sum(1) / real.sum(1)
        elif self.mode == "max":
            found = states.masked_fill(~real, -torch.inf).amax(1)
        else:
            length = mask.shape[1]
            first = mask.int().argmax(1)
            place = first if self.mode == "cls" else length - 1 - mask.flip(1).int().argmax(1)
            found = states[torch.arange(len(states), device=states.device), place]
        return torch.nn.functional.normalize(found, dim=-1) if self.normalizes else found


def embed(loaded: LoadedModel, request: EmbeddingRequest) -> Embeddings:
    """Return a vector for each text. Raises InvalidRequest and InvalidCheckpoint."""
    pooling, reader = Pooling.of(loaded), loaded.reader
    rows = _rows(loaded, request)
    stack = reader.batch([Tokens(ids, [None] * len(ids)) for ids in rows])
    mask = torch.ones_like(stack.ids, dtype=torch.bool) if stack.mask is None else stack.mask
    base = loaded.model.get_encoder() if reader.pairs else loaded.model.base_model
    checkpoint()
    with torch.inference_mode():
        arguments = {
            name: x for name, x in reader.arguments(stack).items() if name != "position_ids" or not reader.pairs
        }
        vectors = pooling.pooled(base(**arguments).last_hidden_state, mask)
    if request.dimensions is not None:
        vectors = torch.nn.functional.normalize(vectors[:, : request.dimensions], dim=-1)
    told: list[Any] = vectors.tolist()
    if request.encoding_format == "base64":
        told = [
            base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors.cpu().numpy().astype(np.float32)
        ]
    count = sum(map(len, rows))
    return Embeddings(
        data=[Embedding(index=index, embedding=vector) for index, vector in enumerate(told)],
        model=request.model,
        usage=Usage(prompt_tokens=count, total_tokens=count),
    )


def embedding_bytes(loaded: LoadedModel, request: EmbeddingRequest) -> int:
    """Check a request, and estimate the memory that it takes besides the model."""
    rows = _rows(loaded, request)
    config, width = loaded.model.config.get_text_config(), loaded.model.dtype.itemsize
    return len(rows) * max(map(len, rows)) * int(config.hidden_size) * STATES * width


def _rows(loaded: LoadedModel, request: EmbeddingRequest) -> list[list[int]]:
    size = loaded.model.config.get_text_config().hidden_size
    if request.dimensions is not None and request.dimensions > size:
        raise InvalidRequest.at("dimensions", f"the vectors have {size}", limit=size)
    return prompt_tokens(loaded, request.input, "input")


def _read(folder: Path, name: str, kind: type) -> Any:
    """The content of a file inside a checkpoint, which is JSON of this type. Raises InvalidCheckpoint."""
    file = Path(name)
    try:
        found = None if file.is_absolute() or ".." in file.parts else json.loads((folder / file).read_bytes())
    except (OSError, ValueError) as fault:
        raise InvalidCheckpoint.at("model", f"{name} of its pooling cannot be read: {type(fault).__name__}") from None
    if not isinstance(found, kind):
        raise InvalidCheckpoint.at("model", f"{name} of its pooling is no {_KINDS[kind]} inside the checkpoint")
    return found
