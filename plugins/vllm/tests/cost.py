"""Processor time a token of the plugin, beside vLLM without it: ``python cost.py [ROUNDS]`` where the tests run.

Both engines are in this process and compute the same 16 prompts in turn, so that a busy machine slows both.
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
    "idle": None,
    "entropies": {"statistics": ["entropy"]},
    "five statistics": {"statistics": FIVE},
    "five statistics, top 3 keys": {"statistics": FIVE, "top_k": 3},
    "weights": {"statistics": [], "weights": True},
    "an edit of context each": {"statistics": []} | EDIT,
    "entropies, 1 of 16 asks": {"statistics": ["entropy"]},
}


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
    times: dict[str, list[float]] = {name: [] for name in ("without", *names)}
    for number in range(rounds + 1):
        prompts = conftest.texts(100 + number, CALLERS, 10, 60)
        for name, own in times.items():
            engine = plain if name == "without" else ours
            asks = [ASKS.get(name)] * CALLERS
            if "1 of 16" in name:
                asks[1:] = [None] * (CALLERS - 1)
            begun = time.process_time()
            engine.run(prompts, asks, NEW, salts=[f"{name} {number} {at}" for at in range(CALLERS)])
            if number:  # the first one warms up
                own.append(1e3 * (time.process_time() - begun) / (CALLERS * NEW))
    for name, own in times.items():
        ratios = [one / base for one, base in zip(own, times["without"], strict=True)]
        print(json.dumps({"what": name, "ms a token": round(median(own), 3), "times": round(median(ratios), 3),
                          "ratios": [round(each, 2) for each in ratios]}), flush=True)  # fmt: skip
    plain.close()
    ours.close()


if __name__ == "__main__":
    main()
