"""Engines of vLLM in this process, random checkpoints, and the attention that transformers computes of them."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL = {
    "vocab_size": 2000, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1,
    "initializer_range": 0.15, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8,
}  # fmt: skip
MAKERS = {
    "grouped": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
    "window": lambda: MistralForCausalLM(
        MistralConfig(**SMALL, num_key_value_heads=4, sliding_window=24, head_dim=32)
    ),
    "normed": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=64)),
    "capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SMALL, num_key_value_heads=4, head_dim=32, sliding_window=24, query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
        )
    ),
}  # fmt: skip
"""Model types: grouped heads, a window, norms of queries and keys, capped scores with a window in every other layer."""
STATISTICS = ["entropy", "max_weight", "first_key", "own_position", "mean_distance"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        make().float().save_pretrained(folder / name)
    return folder


TINY = Path(__file__).parents[3] / "service" / "attention_service" / "tiny_model"


@pytest.fixture(scope="session")
def served_model(checkpoints) -> Path:
    """A checkpoint with a tokenizer."""
    torch.manual_seed(0)
    MAKERS["grouped"]().float().save_pretrained(checkpoints / "served")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(checkpoints / "served")
    return checkpoints / "served"


@contextmanager
def serving(folder: Path, *options: str, **variables: str) -> Iterator[str]:
    """The address of ``attention-vllm serve`` with this checkpoint as model ``m``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("attention-vllm")), "serve", str(folder), "--served-model-name", "m",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(2**27),
        "--host", "127.0.0.1", "--port", str(port), *options,
    ]  # fmt: skip
    own = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(command, env=own | variables, start_new_session=True, stdout=log, stderr=log)
        address = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                time.sleep(1)
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5).close()
                    break
                except OSError:
                    assert process.poll() is None, Path(log.name).read_text()[-3000:]
            else:
                raise TimeoutError(Path(log.name).read_text()[-3000:])
            yield address
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


class Engine:
    """vLLM's engine, driven step by step."""

    def __init__(self, folder: Path, *, length: int = 1024, observing: bool = True, **more):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if observing:
            more["worker_cls"] = "attention_vllm.inside.observing_workers.ObservingCPUWorker"
        arguments = EngineArgs(
            model=str(folder), dtype=more.pop("dtype", "float32"), enforce_eager=True, skip_tokenizer_init=True,
            max_model_len=length, max_num_seqs=16, disable_log_stats=True, kv_cache_memory_bytes=2**28, **more,
        )  # fmt: skip
        self.core = LLMEngine.from_engine_args(arguments)
        self.facts: dict[str, int] = {}

    def run(self, prompts, asks, new, *, salts=None, at_once=None):
        """Generate greedily; the tokens and the results of each prompt. ``at_once``: begin so many in each step."""
        from vllm import SamplingParams

        from attention_vllm.worker_process import take_results

        names = [f"r{random.randrange(2**40)}" for _ in prompts]
        todo, tokens, results, lost = [*enumerate(names)], {}, {name: [] for name in names}, {}
        self.facts = {"cached": 0, "steps": 0}
        scheduler = self.core.engine_core.engine_core.scheduler
        while todo or self.core.has_unfinished_requests():
            for at, name in todo[:at_once]:
                prompt, extra = {"prompt_token_ids": prompts[at]}, None
                if salts and salts[at]:
                    prompt["cache_salt"] = salts[at]
                if asks[at] is not None:
                    extra = {"attention": {"id": name, "attention": asks[at], "cache_salt": prompt.get("cache_salt")}}
                settings = SamplingParams(
                    max_tokens=new, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra
                )
                self.core.add_request(name, prompt, settings)
            todo = todo[at_once:] if at_once else []
            lost |= {each.request_id: each.num_preemptions for each in scheduler.requests.values()}
            for output in self.core.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.facts["cached"] += output.num_cached_tokens or 0
            self.facts["steps"] += 1
            for name in names:
                results[name] += take_results(name)
        self.facts["preemptions"] = sum(lost.values())
        return [tokens[name] for name in names], [results[name] for name in names]

    def close(self):
        self.core.engine_core.shutdown()


@pytest.fixture
def engine(checkpoints):
    made = []

    def make(name, **options):
        made.append(Engine(checkpoints / name, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def reference(checkpoints):
    """Attentions and logits of transformers' eager attention, of a checkpoint and tokens."""

    models = {}

    def compute(name, ids):
        if name not in models:
            models[name] = AutoModelForCausalLM.from_pretrained(
                checkpoints / name, attn_implementation="eager", dtype=torch.float64
            ).eval()
        with torch.inference_mode():
            out = models[name](torch.tensor([ids]), output_attentions=True, use_cache=False)
        return [x[0].double().numpy() for x in out.attentions], out.logits[0]

    return compute


def texts(seed, count, low, high, prefix=()):
    """Random prompts."""
    draw = random.Random(seed)
    return [[*prefix, *(draw.randrange(2, 2000) for _ in range(draw.randint(low, high)))] for _ in range(count)]


def statistics_of(weights):
    """The five statistics of one query's weights ``[H, K]``, by their definitions."""
    keys = np.arange(weights.shape[1])
    logs = np.log(np.where(weights > 0, weights, 1))
    return {
        "entropy": -(weights * logs).sum(-1), "max_weight": weights.max(-1), "first_key": weights[:, 0],
        "own_position": weights[:, -1], "mean_distance": (weights * (weights.shape[1] - 1 - keys)).sum(-1),
    }  # fmt: skip
