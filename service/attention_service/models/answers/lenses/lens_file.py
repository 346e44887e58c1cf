"""The file of a fitted lens, as the process of a model reads it: one matrix at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from attention_contract.errors import InternalError, InvalidRequest
from attention_service.models.loaded.streams.residual_stream import ResidualStream
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.modules.store_files import open_tensors


@dataclass(frozen=True)
class LensFile:
    """A lens in the store."""

    path: Path

    def check(self, stream: ResidualStream, places: Sequence[AttentionPlace]) -> None:
        """Raise InvalidRequest unless the lens has a matrix of the model's width for each layer but the last."""
        if stream.several_streams:
            raise InvalidRequest.at("kind", "a Jacobian lens needs states that are one stream")
        width, shapes = stream.readout.width, self._shapes()
        for number in map(stream.number, places):
            if number < stream.count - 1 and shapes.get(number) != [width, width]:
                shape = shapes.get(number)
                got = "none" if shape is None else f"{shape}"
                raise InvalidRequest.at(
                    "lens", f"expected a matrix {[width, width]} for layer {number} of this model; the lens has {got}"
                )

    def matrix(self, number: int) -> Tensor:
        """The matrix of a layer, in float32."""
        with open_tensors(self.path) as file:
            jacobian: Tensor = file.get_tensor(f"jacobians.{number}")
        return jacobian.to(torch.float32)

    def _shapes(self) -> dict[int, list[int]]:
        try:
            with open_tensors(self.path) as file:
                return {
                    int(name.rpartition(".")[2]): list(file.get_slice(name).get_shape())
                    for name in file.keys()  # noqa: SIM118
                }
        except FileNotFoundError:
            raise InvalidRequest.at("lens", "it was deleted meanwhile") from None
        except (SafetensorError, OSError) as fault:
            raise InternalError(f"the stored lens cannot be read: {fault}; delete it") from fault
