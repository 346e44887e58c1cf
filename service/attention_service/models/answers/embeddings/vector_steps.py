"""The modules of sentence-transformers behind a pooling: vectors of length 1, and layers with tensors of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.store_files import open_tensors

VectorStep = Callable[[Tensor], Tensor]
"""Takes vectors ``[B, width]`` and returns others."""


def normalized(vectors: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return nn.functional.normalize(vectors, dim=-1)


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer and an activation: activation(W·x + b), with W·x or x added to it if it is residual."""

    file: Path
    """The safetensors file with ``linear.weight [outputs, inputs]``, and ``linear.bias`` and ``residual.weight``."""
    inputs: int
    outputs: int
    activation: str
    """The name of its class in PyTorch."""
    bias: bool
    residual: bool

    @property
    def held_bytes(self) -> int:
        """Estimate the memory of its tensors: as they are stored, and as float32."""
        return 2 * 4 * self.outputs * (self.inputs * (1 + self.residual) + 1)

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return ``[B, outputs]`` of vectors ``[B, inputs]``. Raises InvalidCheckpoint for tensors of other shapes."""
        projected = self.residual and self.inputs != self.outputs
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (self.outputs, self.inputs)}
        shapes |= {"linear.bias": (self.outputs,)} if self.bias else {}
        shapes |= {"residual.weight": (self.outputs, self.inputs)} if projected else {}
        tensors = self._read(shapes, vectors)
        linear = nn.functional.linear(vectors, tensors["linear.weight"], tensors.get("linear.bias"))
        made: Tensor = activation_of(self.activation)(linear)
        if projected:
            return made + nn.functional.linear(vectors, tensors["residual.weight"])
        return made + vectors if self.residual else made

    def _read(self, shapes: dict[str, tuple[int, ...]], like: Tensor) -> dict[str, Tensor]:
        try:
            with open_tensors(self.file) as stored:
                shapes_stored = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118 - no mapping
                if shapes_stored != {name: [*shape] for name, shape in shapes.items()}:
                    raise InvalidCheckpoint.at(
                        "model", f"{self._name} has tensors {shapes_stored}; its config says {shapes}"
                    )
                return {name: stored.get_tensor(name).to(like.device, like.dtype) for name in shapes}
        except (OSError, SafetensorError) as fault:
            raise InvalidCheckpoint.at("model", f"{self._name} cannot be read: {type(fault).__name__}") from None

    @property
    def _name(self) -> str:
        return f"{self.file.parent.name}/{self.file.name}"


def activation_of(name: str) -> nn.Module:
    """Return an activation of PyTorch by the name of its class. Raises InvalidCheckpoint for one without defaults."""
    kind = getattr(nn, name, None)
    try:
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__.startswith("torch.nn.modules."):
            made: nn.Module = kind()
            if not [*made.parameters()]:
                return made
    except TypeError:  # it needs arguments
        pass
    raise InvalidCheckpoint.at("model", f"expected an activation of torch.nn; got {name[:80]!r}")
