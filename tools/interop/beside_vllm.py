"""The same HTTP requests to this service and to vLLM with its plugin: ``python -m tools.interop.beside_vllm``.

Both serve one random checkpoint. Replies must be equal field by field, numbers within a tolerance; refusals by status
and the field that they name. It needs the environment that ``make test-vllm`` makes, or another one with the plugin.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import torch
from benchmarks.processes import free_port, running
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tools.proof.servers import serving

ROOT: Final = Path(__file__).parents[2]
VLLM: Final = ROOT / ".cache" / "vllm" / "bin" / "attention-vllm"
TINY: Final = ROOT / "service" / "attention_service" / "tiny_model"
MODEL: Final = "beside"
TOLERANCE: Final = 5e-5
OWN_FIELDS: Final = frozenset({
    "id", "created", "ran", "prompt_tokens_details", "token", "tokens", "text_offset", "top_logprobs", "spans",
})  # fmt: skip
"""Fields in which each server says something of its own: names, times, what it ran, and the readable form of tokens.
The ``id`` of a generated token is a number, and is compared."""
PART: Final = "\ufffd"
"""A part of a character, which vLLM leaves out at the end of a text."""
PROMPT: Final = [7, *range(20, 50)]
LOOK: Final = {"weights": True, "top_k": 3}
MESSAGES: Final = [
    {"role": "system", "content": "be short"}, {"role": "user", "content": "the cat sat on the mat"},
]  # fmt: skip
SPANS: Final = [
    {"name": "rules", "messages": [0]}, {"name": "question", "messages": [1]}, {"name": "begin", "tokens": [0, 2]},
    {"name": "some", "characters": [3, 20]},
]  # fmt: skip
PAIRS: Final = [[30, 0], [30, 5], [31, 31], [33, 4], [33, 9]]
"""The last token of the prompt is the first query."""
EDITS: Final[Mapping[str, Any]] = {
    "q": {"tap": "q", "heads": [3], "scale": 0.5},
    "k": {"tap": "k", "heads": [1], "add": 0.25},
    "v": {"tap": "v", "heads": [0], "keys": [2, 5], "set": 0},
    "scores": {"tap": "scores", "heads": [2], "keys": [1, 2], "add": -3.5},
    "capped_scores": {"tap": "capped_scores", "scale": 0.5},
    "masked_scores": {"tap": "masked_scores", "keys": [0], "set": "-Infinity"},
    "weights": {"tap": "weights", "heads": [2, 5], "keys": [0], "set": 0, "renormalize": True},
    "context": {"tap": "context", "heads": [1], "queries": [30, 31, 32], "set": 0},
    "output": {"tap": "output", "add": [0.01 * at for at in range(256)]},
    "output of some": {"tap": "output", "queries": [3, 31], "value": [[0.5], [-0.5]]},
}
REFUSED: Final[Mapping[str, Any]] = {
    "a layer that is not there": {"layers": [9]},
    "a head that is not there": {"heads": [77]},
    "a negative count": {"top_k": -1},
    "an unknown field": {"more": 1},
    "pairs of none": {"statistics": ["entropy", "pairs"]},
    "pairs of the prompt": {"statistics": ["pairs"], "statistic_options": {"pairs": [[3, 2]]}},
    "a pair with a later key": {"statistics": ["pairs"], "statistic_options": {"pairs": [[30, 1], [32, 33]]}},
    "candidates behind the text": {
        "statistics": ["pairs"], "statistic_options": {"pairs": [[30, 1]], "candidates": [36]},
    },
    "alignment": {"statistics": ["alignment"]},
    "learned sinks": {"statistics": ["sink_mass"]},
    "classes of none": {"statistics": ["classes"]},
    "spans without classes": {"statistic_options": {"spans": [{"name": "a", "tokens": [0, 1]}]}},
    "spans behind the prompt": {
        "statistics": ["classes"], "statistic_options": {"spans": [{"name": "a", "tokens": [0, 99]}]},
    },
    "heads of an output": {"edits": {"1": [{"tap": "output", "heads": [0], "set": 0}]}},
    "an index twice": {"edits": {"1": [{"tap": "q", "heads": [1, 1], "value": [[[1.0]], [[2.0]]]}]}},
    "numbers that are none": {"edits": {"1": [{"tap": "context", "set": "NaN"}]}},
    "two actions": {"edits": {"1": [{"tap": "context", "set": 0, "scale": 2}]}},
    "an answer without edits": {"from": "answer"},
}  # fmt: skip


def requests() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what is asked, the path and the body."""
    completion = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    statistics = [
        "entropy", "effective_keys", "max_weight", "mean_distance", "signed_distance", "locality", "first_key",
        "sink_share", "own_position", "previous_token", "next_token", "duplicate_token", "induction", "received",
        "classes",
    ]  # fmt: skip
    options = {"window": 3, "sinks": 2, "token_classes": {"some": [20, 21, 35]}}
    looks: dict[str, Any] = {
        "defaults": {},
        "weights and top keys": LOOK,
        "layers and heads in order": LOOK | {"layers": [2, 0], "heads": [5, 1]},
        "every statistic": {"statistics": statistics, "statistic_options": options},
        "pairs": {"statistics": ["pairs", "entropy"], "statistic_options": {"pairs": PAIRS}},
        "pairs among candidates": {
            "statistics": ["pairs"],
            "heads": [2, 0],
            "statistic_options": {"pairs": PAIRS, "candidates": [0, 4, 5, 9, 31]},
        },
        "spans of tokens": {"statistics": ["classes"], "statistic_options": {"spans": SPANS[2:3]}},
    }
    for name, look in looks.items():
        for streams in (False, True):
            body = completion | {"attention": look, "stream": streams}
            yield f"{name}{', streamed' if streams else ''}", "/v1/completions", body
    yield "text", "/v1/completions", completion | {"prompt": "the cat sat on", "attention": LOOK, "logprobs": 3}
    spans = {"statistics": ["classes", "entropy"], "statistic_options": {"spans": SPANS}}
    for streams in (False, True):
        body = chat | {"attention": LOOK | spans, "stream": streams}
        yield f"chat with spans{', streamed' if streams else ''}", "/v1/chat/completions", body
    for name, edit in EDITS.items():
        look = LOOK | {"edits": {"1": [edit]}}
        yield f"edit of {name}", "/v1/completions", completion | {"attention": look}
    for name in ("context", "output"):
        edit = {"tap": name, "scale": 0.5}
        look = LOOK | {"edits": {"0": [edit]}, "from": "answer"}
        yield f"edit of {name} from the answer", "/v1/completions", completion | {"attention": look}
    for name, fault in REFUSED.items():
        yield f"refused: {name}", "/v1/completions", completion | {"attention": fault}
    taps = {"tokens": PROMPT, "return": ["weights", "context", "output"], "layers": [1, 2], "top_k": 0}
    yield "taps of a text", f"/v1/models/{MODEL}/forward", taps


def differences(first: Any, second: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the difference of numbers by their place; infinite for what is not equal.

    It is relative to the largest number of a list that has a larger one than 1.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        own = {name for name in OWN_FIELDS if name != "id" or not isinstance(first.get("id"), int)}
        for name in sorted((first.keys() | second.keys()) - own):
            yield from differences(first.get(name), second.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            yield f"{path} ({len(first)} and {len(second)} entries)", math.inf
        largest = max((abs(each) for each in first if isinstance(each, int | float)), default=0.0)
        for at, (one, other) in enumerate(zip(first, second, strict=False)):
            yield from ((place, x / max(1.0, largest)) for place, x in differences(one, other, f"{path}.{at}"))
    elif isinstance(first, int | float) and isinstance(second, int | float) and not isinstance(first, bool):
        yield path, abs(first - second)
    elif isinstance(first, str) and isinstance(second, str) and first.replace(PART, "") == second.replace(PART, ""):
        yield path, 0.0
    elif first != second:
        yield f"{path} ({json.dumps(first)[:60]} and {json.dumps(second)[:60]})", math.inf


def answer(client: httpx.Client, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply; of a stream its choices joined, of a refusal the status and the field."""
    reply = client.post(path, json=body)
    if reply.status_code != httpx.codes.OK:
        problem = reply.json()
        problem = problem.get("error", problem)
        # OpenAI's API says 400 for what other routes call 422.
        return {"status": 400 if reply.status_code == 422 else reply.status_code, "param": problem["param"]}
    if not body.get("stream"):
        return dict(reply.json())
    joined: dict[str, Any] = {"text": "", "attention": [], "finish_reason": None}
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[len("data: ") :]).get("choices", ()):
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                joined["text"] += piece
                joined["attention"] += choice.get("attention") or []
                joined["finish_reason"] = choice.get("finish_reason") or joined["finish_reason"]
    return joined


def compare(ours: httpx.Client, theirs: httpx.Client, tolerance: float) -> int:
    """Ask everything of both, and print the largest difference of each. Returns the number of failures."""
    failures = 0
    for name, path, body in requests():
        first, second = (answer(client, path, body) for client in (ours, theirs))
        place, worst = max(differences(first, second), key=lambda each: each[1], default=("", 0.0))
        if name.startswith("refused") != ("status" in first):
            place, worst = f"this service answered {json.dumps(first)[:200]}", math.inf
        failed = not worst <= tolerance
        failures += failed
        print(f"{'FAILED' if failed else 'passed'} {worst:.1e} {name}{f': {place}' if failed else ''}", flush=True)
    return failures


def edited_among_16(name: str, client: httpx.Client, tolerance: float) -> int:
    """Ask 16 prompts at once, and once more with edits in one of them. Returns 1 if another one's reply differs."""
    prompts = [[5 + at, *range(10, 14 + 3 * at)] for at in range(16)]
    body = {"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    edits = {"edits": {"1": [EDITS["context"] | {"queries": None}, EDITS["output"]]}}

    def ask(edited: int | None) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(16) as pool:
            bodies = [
                body | {"prompt": prompt, "attention": LOOK | (edits if at == edited else {})}
                for at, prompt in enumerate(prompts)
            ]
            return list(pool.map(lambda each: answer(client, "/v1/completions", each), bodies))

    plain, mixed = ask(None), ask(5)
    changed = [max((x for _, x in differences(*pair)), default=0.0) for pair in zip(plain, mixed, strict=True)]
    worst = max(x for at, x in enumerate(changed) if at != 5)
    failed = not (worst <= tolerance < changed[5])
    print(f"{'FAILED' if failed else 'passed'} {worst:.1e} {name}: 15 callers beside one with edits", flush=True)
    return failed


@contextmanager
def vllm(folder: Path, program: str, options: Sequence[str]) -> Iterator[str]:
    """The address of vLLM with the plugin, over the checkpoint in a folder."""
    port = free_port()
    command = [
        program, "serve", str(folder / "models" / MODEL), "--served-model-name", MODEL, "--enforce-eager",
        "--max-model-len", "512", "--kv-cache-memory-bytes", str(2**27),
        "--host", "127.0.0.1", "--port", str(port), *options,
    ]  # fmt: skip
    own = {
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))
    with running(command, port, "/health", cores, own, folder / "vllm.log", start_s=600):
        yield f"http://127.0.0.1:{port}"


def make_checkpoint(folder: Path, dtype: torch.dtype) -> None:
    """Write a random checkpoint with a tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=max(2000, len(tokenizer)), max_position_embeddings=2048, initializer_range=0.15, hidden_size=256,
        intermediate_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def main() -> int:
    """Start both, or ask those that are named, and return the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", help=f"a server that runs, with the model {MODEL}")
    parser.add_argument("--theirs", help="the same of vLLM")
    parser.add_argument(
        "--program", default=str(VLLM), help="the command attention-vllm; default: that of make test-vllm"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument(
        "--options", nargs=argparse.REMAINDER, default=[], help="further options of vllm serve, at the end"
    )
    given = parser.parse_args()
    if given.ours is not None:
        return both(given.ours, given.theirs, given.tolerance)
    program = shutil.which(given.program)
    if program is None:
        sys.exit(f"{given.program} is not there; make test-vllm installs vLLM")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "models").mkdir()
        make_checkpoint(folder / "models" / MODEL, getattr(torch, given.dtype))
        options = ["--dtype", given.dtype, *given.options]
        with serving(folder) as server, vllm(folder, program, options) as theirs:
            return both(f"http://127.0.0.1:{server.port}", theirs, given.tolerance)


def both(ours: str, theirs: str, tolerance: float) -> int:
    """Compare two servers. Returns the number of failures."""
    with httpx.Client(base_url=ours, timeout=300) as first, httpx.Client(base_url=theirs, timeout=300) as second:
        failures = compare(first, second, tolerance)
        for name, client in (("this service", first), ("vLLM", second)):
            failures += edited_among_16(name, client, tolerance)
    print(f"{failures} failures")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(), 1))
