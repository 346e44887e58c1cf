"""Workloads of the serving benchmarks: shapes, weights, one request and its correct answer."""

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
    """Duration of one run of the load generator."""
    different: int = 1
    """Different requests that are sent in turn. With more than one, their lengths are drawn from 1 to ``length``."""

    @property
    def mixed(self) -> bool:
        """True if the requests have different lengths."""
        return self.different > 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the query and of the output; the length is -1 if it differs."""
        return self.batch, -1 if self.mixed else self.length, self.width

    @property
    def text(self) -> str:
        """The sizes in one phrase."""
        size = 4 * self.batch * self.length * self.width
        size_text = f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
        cores = "one core" if self.cores == 1 else f"{self.cores} cores"
        if self.mixed:
            return f"{self.different} requests of 1 to {self.length} tokens, d{self.width} h{self.heads}, {cores}"
        return f"B{self.batch} L{self.length} d{self.width} h{self.heads}, {size_text} each way, {cores}"

    def query(self, index: int = 0) -> Floats:
        """One of many requests; the first is the one that is timed."""
        length = int(np.random.default_rng(index).integers(1, self.length + 1)) if self.mixed else self.length
        return _normal(index, (self.batch, length, self.width))

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
        """Compute attention in float64, step by step."""
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
        Workload("mixed", 1, 128, 64, 4, different=512),
        Workload("mixed-512", 1, 512, 512, 8, different=256, concurrency=(1, 16), seconds=2),
    )
}
