"""PyTriton: Triton with its model in this process, reached through the wheel's own proxy."""

import sys
from pathlib import Path

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.servers.attention import Attention


def main(weights: str, port: str, threads: str) -> None:
    """Serve until terminated."""
    attention = Attention(Path(weights), int(threads))

    @batch
    def infer(query: np.ndarray) -> dict[str, np.ndarray]:
        return {"output": attention(torch.from_numpy(query)).numpy()}

    config = TritonConfig(http_address="127.0.0.1", http_port=int(port), allow_grpc=False, allow_metrics=False)
    with Triton(config=config) as triton:
        shape = attention.shape[1:]
        triton.bind(
            "attention", infer, [Tensor(name="query", dtype=np.float32, shape=shape)],
            [Tensor(name="output", dtype=np.float32, shape=shape)],
            config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=0)),
        )  # fmt: skip
        triton.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
