"""Transformers' own ways to decode a batch, in this process: beside the server in ``benchmarks.decode``."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import set_verbosity_error

VOCABULARY = 64


@dataclass(frozen=True)
class Peer:
    """A way to decode."""

    name: str
    seconds: Callable[[], Awaitable[float]]
    """Run one round; the seconds of the tokens after the first."""


def peers(width: int, heads: int, sequences: int, past: int, steps: int) -> list[Peer]:
    """A padded batch with transformers' cache, and its continuous batching."""
    set_verbosity_error()
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width, num_hidden_layers=1,
        num_attention_heads=heads, max_position_embeddings=4 * (past + steps), pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.eval()
    prompts = torch.randint(1, VOCABULARY, (sequences, past)).tolist()

    options: Any = GenerationConfig

    def padded(count: int) -> None:
        given = torch.tensor(prompts)
        model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count)

    def continuous(count: int) -> None:
        chosen = options(do_sample=False, max_new_tokens=count, eos_token_id=-1, pad_token_id=0)
        # Enough pages for all sequences: by default it fills the memory first, which takes twenty seconds.
        pages = ContinuousBatchingConfig(num_blocks=2 * sequences * -(-(past + steps) // 256), max_batch_tokens=past)
        found = model.generate_batch(
            prompts, generation_config=chosen, continuous_batching_config=pages, progress_bar=False
        )
        if sum(len(each.generated_tokens) for each in found.values()) != count * sequences:
            raise RuntimeError("continuous batching generated fewer tokens")

    def peer(name: str, generate: Callable[[int], None]) -> Peer:
        async def seconds() -> float:
            return await asyncio.to_thread(_of_later_tokens, generate, steps)

        return Peer(name, seconds)

    return [
        peer("transformers, padded batch, in process", padded),
        peer("transformers, continuous batching, in process", continuous),
    ]


def _of_later_tokens(generate: Callable[[int], None], steps: int) -> float:
    """The seconds of all tokens after the first."""
    times: list[float] = []
    for count in (1, steps + 1):
        started = time.perf_counter()
        generate(count)
        times.append(time.perf_counter() - started)
    return times[1] - times[0]
