"""The attention that every other server runs: the fewest torch calls that give the answer."""

import warnings
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

warnings.filterwarnings("ignore", "The given buffer is not writable")  # nobody writes to it


class Attention:
    """Multi-head self-attention with the weights of one file."""

    def __init__(self, file: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        with np.load(file) as file_arrays:
            self.heads = int(file_arrays["heads"])
            self.shape = tuple(int(size) for size in file_arrays["shape"])
            """Shape of one request, ``[B, L, d]``."""
            names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
            self._weights = [torch.from_numpy(file_arrays[name]) for name in names]

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, L, d]`` to the same."""
        batch, length, width = x.shape
        in_weight, in_bias, out_weight, out_bias = self._weights
        joint = linear(x, in_weight, in_bias).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = joint.permute(2, 0, 3, 1, 4)  # each [B, H, L, D]
        context = scaled_dot_product_attention(q, k, v)
        return linear(context.transpose(1, 2).reshape(batch, length, width), out_weight, out_bias)

    def of_bytes(self, *bodies: bytes | memoryview) -> list[memoryview]:
        """The answers to requests of raw float32, in one batch if they have one length."""
        if self.shape[1] < 0:
            return [self._of_any_length(body) for body in bodies]
        joined = bodies[0] if len(bodies) == 1 else b"".join(bodies)
        x = torch.frombuffer(joined, dtype=torch.float32).view(-1, *self.shape[1:])
        output = self(x).numpy().data.cast("B")
        size = len(output) // len(bodies)
        return [output[start : start + size] for start in range(0, len(output), size)]

    def _of_any_length(self, body: bytes | memoryview) -> memoryview:
        x = torch.frombuffer(body, dtype=torch.float32).view(self.shape)
        return self(x).numpy().data.cast("B")
