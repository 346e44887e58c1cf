"""What is served: shapes, weights, one request and the answer that it must get."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Workload:
    """Self-attention of one module: ``batch`` sequences of ``length`` vectors ``width`` wide, in float32."""

    name: str
    batch: int
    length: int
    width: int
    heads: int
    cores: int = 1
    """Processor cores of the server."""
    concurrency: tuple[int, ...] = (1, 16, 64)
    seconds: float = 1
    """Of one run of the load generator."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the query and of the output."""
        return self.batch, self.length, self.width

    @property
    def text(self) -> str:
        """The sizes in one phrase."""
        size = 4 * self.batch * self.length * self.width
        told = f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
        cores = "one core" if self.cores == 1 else f"{self.cores} cores"
        return f"B{self.batch} L{self.length} d{self.width} h{self.heads}, {told} each way, {cores}"

    def query(self, index: int = 0) -> Floats:
        """One of many requests; the first is the one that is timed."""
        return _normal(index, self.shape)

    def weights(self) -> dict[str, Floats]:
        """The parameters by the names of ``torch.nn.MultiheadAttention``."""
        width, scale = self.width, np.float32(self.width**-0.5)
        shapes = {
            "in_proj_weight": (3 * width, width), "in_proj_bias": (3 * width,),
            "out_proj.weight": (width, width), "out_proj.bias": (width,),
        }  # fmt: skip
        return {name: _normal(10_000 + at, shape) * scale for at, (name, shape) in enumerate(shapes.items())}

    def save(self, folder: Path) -> Path:
        """Write the weights where any server can read them, and return the file."""
        file = folder / f"{self.name}.npz"
        np.savez(file, allow_pickle=False, heads=self.heads, shape=self.shape, **self.weights())
        return file

    def answer(self, query: Floats) -> NDArray[np.float64]:
        """What attention gives, in float64 and step by step."""
        weights = {name: value.astype(np.float64) for name, value in self.weights().items()}
        # [B, L, 3, H, D] -> three of [B, H, L, D]
        joint = query.astype(np.float64) @ weights["in_proj_weight"].T + weights["in_proj_bias"]
        q, k, v = np.moveaxis(joint.reshape(*query.shape[:2], 3, self.heads, -1), (2, 3), (0, 2))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = np.moveaxis(scores / scores.sum(-1, keepdims=True) @ v, 1, 2).reshape(query.shape)
        return np.asarray(context @ weights["out_proj.weight"].T + weights["out_proj.bias"])


def _normal(seed: int, shape: tuple[int, ...]) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", 1, 16, 64, 4),
        Workload("W2", 1, 128, 256, 8),
        Workload("W3", 8, 512, 512, 8, cores=2, concurrency=(1, 4), seconds=4),
    )
}
