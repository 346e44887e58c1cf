"""The order of a first hour on a GPU: tests, claims, benchmarks, then the vendor's tools. ``make gpu-hour`` runs it.

``--print`` shows the steps and runs nothing. Each step has a limit, so that none costs the rest; what each says is
also written to the folder of ``--output``. Without a GPU nothing runs.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path(".cache/gpu-hour")
PYTHON = "python"
"""Stands for the Python that runs this."""


@dataclass(frozen=True)
class Step:
    """One command."""

    name: str
    purpose: str
    command: str
    minutes: int
    """Its limit."""
    tool: str | None = None
    """A program without which the step is left out."""

    @property
    def arguments(self) -> list[str]:
        """The command as it is run."""
        return [sys.executable if each == PYTHON else each for each in shlex.split(self.command)]


STEPS = (
    Step("machine", "which GPU, which driver", "nvidia-smi", 1, "nvidia-smi"),
    Step(
        "devices",
        "a model over two GPUs, where there are two, beside the same on one",
        "python -m pytest -q -p no:cacheprovider tests/models/server/test_spread_models.py",
        4,
    ),
    Step("tests", "every test that needs a GPU", "python -m pytest -q -p no:cacheprovider -m gpu tests", 15),
    Step("claims", "one line a claim, beside its goal", "python -m benchmarks.gpu_claims", 15),
    Step(
        "models", "a model of a billion parameters beside transformers and vLLM", "python -m benchmarks.gpu_models", 8
    ),
    Step(
        "walk",
        "every model type beside its eager self, both on the GPU",
        "python -m tools.models_walk --device cuda --jobs 8 --output .cache/gpu-hour/models-table.md",
        10,
    ),
    Step(
        "vllm-triton",
        "the plugin of vLLM with Triton's kernels: the same requests to it and to this server",
        "python -m tools.interop.beside_vllm --program attention-vllm --options --attention-backend TRITON_ATTN",
        6,
        "attention-vllm",
    ),
    Step(
        "vllm-flash",
        "the same with FlashAttention, which has no float32",
        "python -m tools.interop.beside_vllm --program attention-vllm --dtype float16 --tolerance 2e-2 "
        "--options --attention-backend FLASH_ATTN",
        6,
        "attention-vllm",
    ),
    Step("kernels", "kernels, a long request and HTTP beside the bare kernels", "python -m benchmarks.cuda", 15),
    Step(
        "memcheck",
        "memory that a kernel or a copy may not touch",
        "compute-sanitizer --tool memcheck --error-exitcode 9 python -m pytest -q -x -p no:cacheprovider -m gpu "
        "tests/core/test_transfer.py tests/runtime/operations/test_graphs.py tests/core/kv_cache",
        8,
        "compute-sanitizer",
    ),
    Step(
        "ncu",
        "what two passes launch, and how far each kernel is from the GPU's limits",
        "ncu --target-processes all --clock-control none --profile-from-start off --set basic -c 60 "
        "python -m benchmarks.gpu_claims --profile",
        6,
        "ncu",
    ),
)


def shown() -> Iterator[str]:
    """Describe each step in two lines."""
    for number, step in enumerate(STEPS, 1):
        needs = f", if {step.tool} is there" if step.tool else ""
        yield f"{number}. {step.name}: {step.purpose} (at most {step.minutes} min{needs})\n   {step.command}"


def run(step: Step, folder: Path) -> str:
    """Run a step, its output shown and written. Return what became of it."""
    if step.tool is not None and shutil.which(step.tool) is None:
        return f"left out: no {step.tool}"
    started = time.monotonic()
    with (folder / f"{step.name}.txt").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(step.arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, status = process.communicate(timeout=60 * step.minutes)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            output, status = process.communicate()[0], None
        log.write(output)
    print(output, flush=True)
    seconds = time.monotonic() - started
    return f"{'too long' if status is None else 'done' if status == 0 else f'failed ({status})'}, {seconds:.0f} s"


def main() -> int:
    """Print or run the steps. Return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="show the steps and run nothing")
    parser.add_argument("--only", choices=[step.name for step in STEPS], help="run one step")
    parser.add_argument("--output", type=Path, default=FOLDER, help=f"folder of what the steps say (default: {FOLDER})")
    arguments = parser.parse_args()
    if arguments.print:
        print("\n".join(shown()))
        return 0
    if not torch.cuda.is_available():
        print("there is no CUDA device here; --print shows what would run")
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    ended: dict[str, str] = {}
    for step in STEPS:
        if arguments.only in {None, step.name}:
            print(f"\n== {step.name}: {step.command}", flush=True)
            ended[step.name] = run(step, arguments.output)
    print("\n" + "\n".join(f"{name:10} {how}" for name, how in ended.items()))
    return int(any(how.startswith(("failed", "too long")) for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
