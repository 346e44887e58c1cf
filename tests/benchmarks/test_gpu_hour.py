"""The first hour on a GPU: its order is shown anywhere, its steps exist, and its claims are measured, here on a CPU."""

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attention_service.runtime.device.torch_device import Device
from benchmarks import gpu_claims, gpu_hour, gpu_models

ROOT = Path(__file__).parents[2]


def test_the_steps_are_printed_in_order(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu-hour", "--print"])
    assert gpu_hour.main() == 0
    text = capsys.readouterr().out
    places = [text.index(f"{number}. {step.name}: ") for number, step in enumerate(gpu_hour.STEPS, 1)]
    assert places == sorted(places)
    assert [step.name for step in gpu_hour.STEPS] == [
        "machine", "devices", "tests", "claims", "models", "walk", "vllm-triton", "vllm-flash",
        "kernels", "memcheck", "ncu",
    ]  # fmt: skip
    assert all(step.command in text for step in gpu_hour.STEPS)


def test_make_runs_it():
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    done = subprocess.run([make, "--dry-run", "gpu-hour", "ARGS=--print"], cwd=ROOT, capture_output=True, check=True)
    assert b"-m benchmarks.gpu_hour --print" in done.stdout


def test_what_the_steps_name_is_there():
    for step in gpu_hour.STEPS:
        words = step.command.split()
        for before, word in pairwise(words):
            if before == "-m" and "." in word:
                assert importlib.util.find_spec(word), word
            elif word.startswith("tests"):
                assert (ROOT / word).exists(), word


def test_without_a_gpu_nothing_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu-hour", f"--output={tmp_path / 'none'}"])
    assert gpu_hour.main() == 0
    assert "no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_a_step_that_fails_or_lacks_its_tool_costs_the_others_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu-hour", f"--output={tmp_path}"])
    one = gpu_hour.STEPS[0]
    steps = (
        replace(one, name="fails", command="python -c 'import sys; print(1); sys.exit(3)'", tool=None),
        replace(one, name="absent", tool="no-such-program"),
        replace(one, name="sleeps", command="python -c 'import time; time.sleep(60)'", tool=None, minutes=0.01),
        replace(one, name="works", command="python -c 'print(42)'", tool=None),
    )
    monkeypatch.setattr(gpu_hour, "STEPS", steps)
    assert gpu_hour.main() == 1
    text = capsys.readouterr().out
    for words in (
        "fails      failed (3)",
        "absent     left out: no no-such-program",
        "sleeps     too long",
        "works      done",
    ):
        assert words in text
    assert (tmp_path / "works.txt").read_text() == "42\n"


def test_every_claim_is_measured():
    lines = list(gpu_claims.lines(Device.open("cpu"), gpu_claims.SMALL))
    assert not [line for line in lines if line.startswith("FAIL")], "\n".join(lines)
    for words in (
        "products in torch.bfloat16",
        "over the best bare kernel",
        "a window of 4",
        "captures",
        "first pass of 131",
    ):
        assert any(words in line for line in lines), words
    assert any("a step of 2 sessions × 16" in line for line in lines)


def test_a_part_that_fails_is_reported_and_the_others_go_on(monkeypatch):
    def broken(device, work):
        raise RuntimeError("no such kernel")
        yield

    def works(device, work):
        yield gpu_claims.Claim("this", 1.2, 1.3)
        yield gpu_claims.Claim("that", 2, 1, " ms")

    monkeypatch.setattr(gpu_claims, "PARTS", (broken, works))
    failed, held, missed = gpu_claims.lines(None, gpu_claims.SMALL)
    assert failed.startswith("FAIL  broken")
    assert "no such kernel" in failed
    assert held == "held  this: 1.2, goal 1.3"
    assert missed == "MISS  that: 2 ms, goal 1"


@pytest.mark.slow
def test_every_question_to_a_whole_model_is_measured():
    lines = list(gpu_models.lines("cpu", gpu_models.SMALL))
    assert not [line for line in lines if line.startswith("FAIL")], "\n".join(lines)
    for words in (
        "gradients of embeddings, 16 tokens",
        "4 tokens of 2 texts",
        "one batch of 2 texts by transformers",
        "2 callers: ",
        "generated tokens with an edit of each caller's own/s",
        "replies with all weights/s",
        "in flight afterwards: 0",
    ):
        assert any(words in line for line in lines), words


def test_vllm_is_measured_where_it_is_installed(monkeypatch):
    prompt_counts = []

    class Engine:
        def __init__(self, **options):
            assert options["dtype"] == "bfloat16"

        def generate(self, prompts, settings, use_tqdm):
            prompt_counts.append((len(prompts), settings["max_tokens"]))

    library = ModuleType("vllm")
    library.__spec__ = ModuleSpec("vllm", None)
    library.LLM, library.SamplingParams = Engine, dict
    monkeypatch.setitem(sys.modules, "vllm", library)
    lines = list(gpu_models.vllm(gpu_models.SMALL, "cpu"))
    assert [line.partition(":")[0] for line in lines] == ["1 texts by vLLM", "2 texts by vLLM"]
    assert set(prompt_counts) == {(count, gpu_models.SMALL.new) for count in gpu_models.SMALL.callers}
