"""Processor time a token of the plugin, beside vLLM without it: ``python cost.py [ROUNDS] [WHAT …]``, where tests run.

Both engines are in this process, and compute the same 16 prompts one right after the other, in an order that changes
from round to round, so that a busy machine slows both. ``noise`` is vLLM without the plugin beside itself.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import conftest

NEW, CALLERS = 32, 16
FIVE = conftest.STATISTICS
EDIT = {"edits": {"1": [{"tap": "context", "heads": [2], "set": 0.0}]}}
ASKS = {
    "noise": None,
    "idle": None,
    "entropies": {"statistics": ["entropy"]},
    "five statistics": {"statistics": FIVE},
    "five statistics, top 3 keys": {"statistics": FIVE, "top_k": 3},
    "weights": {"statistics": [], "weights": True},
    "an edit of context each": {"statistics": []} | EDIT,
    "entropies, 1 of 16 asks": {"statistics": ["entropy"]},
}


def milliseconds(engine: conftest.Engine, prompts: list[list[int]], asks: list[dict | None]) -> float:
    """Processor time a token. No page of the prompts is found in the prefix cache."""
    salts = [f"{time.monotonic_ns()} {at}" for at in range(CALLERS)]
    begun = time.process_time()
    engine.run(prompts, asks, NEW, salts=salts)
    return 1e3 * (time.process_time() - begun) / (CALLERS * NEW)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    names = sys.argv[2:] or [*ASKS]
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import attention_vllm

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = conftest.SMALL | {
            "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_key_value_heads": 4,
        }  # fmt: skip
        LlamaForCausalLM(LlamaConfig(**config)).float().save_pretrained(folder)
        AttentionBackendEnum.CPU_ATTN.clear_override()
        block = {"block_size": 128, "max_num_batched_tokens": 512}
        plain = conftest.Engine(Path(folder), observing=False, **block)
        attention_vllm.register()
        selector._cached_get_attn_backend.cache_clear()
        ours = conftest.Engine(Path(folder), **block)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        prompts = conftest.texts(100 + number, CALLERS, 10, 60)
        for name, pairs in times.items():
            asks = [ASKS[name]] * CALLERS
            if "1 of 16" in name:
                asks[1:] = [None] * (CALLERS - 1)
            runs = {
                "without": lambda: milliseconds(plain, prompts, [None] * CALLERS),  # noqa: B023
                "with": lambda: milliseconds(plain if name == "noise" else ours, prompts, asks),  # noqa: B023
            }
            spent = {side: runs[side]() for side in sorted(runs, reverse=bool(number % 2))}
            if number:  # the first one warms up
                pairs.append((spent["with"], spent["without"]))
    for name, pairs in times.items():
        ratios = [one / base for one, base in pairs]
        spent_ms = round(median(one for one, _ in pairs), 3)
        every = [round(ratio, 2) for ratio in ratios]
        print(json.dumps({"what": name, "ms a token": spent_ms, "times": round(median(ratios), 3), "ratios": every}))
    plain.close()
    ours.close()


if __name__ == "__main__":
    main()
