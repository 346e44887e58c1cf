"""Compare models that are spread over two processes with the same models in one, question by question.

python -m tools.models_walk.two_devices [--dtype float64] [KIND …]

The two processes take the same steps, as those of a server do, and the first has the model in one process beside it.
By default both compute in float64, so that nothing but the order of sums may differ. A line of JSON a type says the
largest difference of each question, or what refused it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final

import torch
from tests.client.tiny_models import tokenizer
from torch import distributed

from attention_contract.errors import AttentionError
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.passes.device_heads import DeviceHeads
from attention_service.models.process.finite_answers import end_of
from attention_service.models.process.reply_writing import lines_of
from attention_service.models.process.served_model import ServedModel
from tools.models_walk.found import short_error
from tools.models_walk.model_types import built, kinds, prepare
from tools.models_walk.small_configs import small_config

_TEXT: Final = [5, 3, 7, 8, 6, 4, 9]
_TAPS: Final = ["q", "k", "v", "scores", "weights", "context", "output", "hidden", "mlp"]
_STATISTICS: Final = ["entropy", "max_weight", "received", "first_key"]
_EDITS: Final = [
    {"tap": "weights", "heads": [1], "keys": [0], "set": 0, "renormalize": True},
    {"tap": "context", "heads": [0], "scale": 0.5},
    {"tap": "v", "keys": [1], "add": 0.25},
    {"tap": "k", "heads": [1], "scale": 0.5},
]
_GENERATED: Final = {"model": "m", "prompt": _TEXT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
_LOOK: Final = {"layers": "all", "statistics": ["entropy", "max_weight"], "weights": True, "top_k": 2}
_OF: Final = {"position": -1, "token": 4}
_ABOUT: Final = {"tokens": _TEXT, "layers": "all"}
_STATES: Final = {"0": [{"tap": "mlp", "add": 0.5}], "1": [{"tap": "hidden", "scale": 2}]}
_HEADS: Final = {"layer": 0, "heads": [0, 1]}, {"layer": 1, "heads": [0, 1], "parts": ["q"]}
_SHARED: Final = {"prompt": [_TEXT, _TEXT[:3], _TEXT[2:]], "attention": _LOOK | {"edits": {"0": _EDITS[1:2]}}}
_OF_HEADS: Final = [
    {"tap": "q", "heads": [3], "add": 0.5},
    {"tap": "scores", "heads": [0, 2], "queries": [5], "add": 0.25},
    {"tap": "weights", "heads": [2], "keys": [0], "scale": 0.5},
]
_CHANGED: Final = {
    "wrt": ["q", "v", "weights"], "layers": [0, 1], "of": _OF, "select": {"heads": [2], "queries": [5]},
    "edits": {"1": _OF_HEADS}
}  # fmt: skip
QUESTIONS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "logits": ("forward", {"tokens": _TEXT, "return": ["logits"]}),
    "taps": ("forward", _ABOUT | {"return": _TAPS}),
    "edited": ("forward", _ABOUT | {"return": ["logits", "hidden"], "edits": {"1": _EDITS}}),
    "states": ("forward", {"tokens": _TEXT, "return": ["logits"], "edits": _STATES}),
    "router": ("forward", _ABOUT | {"return": ["router"], "edits": {"1": [{"tap": "router", "scale": 0.5}]}}),
    "heads": ("forward", _ABOUT | {"return": _TAPS[:7], "select": {"heads": [3, 0]}, "edits": {"1": _OF_HEADS}}),
    "kept": ("forward", {"tokens": _TEXT, "return": ["logits"], "keep": True}),
    "weights": ("weights", _ABOUT | {"statistics": _STATISTICS, "select": {"heads": [1, 0]}, "top_k": 3}),
    "mean": ("weights", _ABOUT | {"average_heads": True, "select": {"heads": [2, 3, 0]}, "edits": {"1": _OF_HEADS}}),
    "changed": ("weights", _ABOUT | {"compare": "unedited", "return_weights": True, "edits": {"0": _EDITS}}),
    "gradients": ("gradients", _ABOUT | {"wrt": ["embeddings", *_TAPS[:7], "hidden"], "of": _OF}),
    "gradients of heads": ("gradients", {"tokens": _TEXT} | _CHANGED),
    "effects": (
        "effects",
        {"tokens": _TEXT, "sweep": {"tap": "context", "over": ["layers", "heads"], "set": 0}, "of": _OF},
    ),
    "lens": ("lens", {"tokens": _TEXT, "of": ["hidden", "output"], "top_k": 3}),
    "lens of heads": ("lens", {"tokens": _TEXT, "of": ["heads"], "top_k": 3}),
    "paths": ("effects", {"tokens": _TEXT, "from": _HEADS[0], "to": _HEADS[1], "of": _OF}),
    "context": ("context", {"sources": [{"text": "the cat"}, {"text": "a dog sat"}], "answer": "the cat sat"}),
    "similarity": ("similarity", {"pairs": [["the cat sat", "a dog"]]}),
    "embeddings": ("embed", {"model": "m", "input": [_TEXT]}),
    "generation": ("complete", _GENERATED),
    "drawn": ("complete", _GENERATED | {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 2}),
    "seen": ("complete", _GENERATED | {"attention": _LOOK}),
    "edited text": ("complete", _GENERATED | {"attention": _LOOK | {"edits": {"1": _EDITS}}}),
    "shared": ("complete", _GENERATED | _SHARED),
}
"""The questions, each by its operation and its request."""
_PATIENCE_S: Final = 300.0
"""Seconds for one type, after which its processes are taken to wait for each other."""
_NOT_COMPARED: Final = frozenset({"ran", "created", "id", "usage", "device"})


def answer(served: ServedModel, operation: str, request: dict[str, Any]) -> Any:
    """Return all that a model answers to a request, as plain data."""
    events: list[Any] = []
    body = memoryview(json.dumps(named(request, operation, served.loaded.places)).encode())
    facts = {"free_bytes": 2**34, "reader": "", "form": "", "encoding": "list"}
    work = served.prepare(operation, body, facts, events.append)
    found = end_of(work)
    if isinstance(found, RunningGeneration):
        while not found.has_ended:
            faults = served.read([found], 512) if found.unread else served.step([found])
            for fault in faults.values():
                raise fault
        done = end_of(served.finish(found))
        return [json.loads(line) for line in _lines([*events, lines_of(done.last)])]
    return json.loads(found.reply.model_dump_json(by_alias=True))


def named(request: dict[str, Any], operation: str, layers: Collection[str]) -> dict[str, Any]:
    """Return a request whose layers 0 and 1 have the names that a model gives them, if it has an encoder and a decoder.

    Those of whole texts are the encoder's.
    """
    if "0" in layers:
        return request
    stack = "decoder" if operation == "complete" else "encoder"
    own = dict(request)
    if "edits" in own:
        own["edits"] = {f"{stack}.{layer}": edits for layer, edits in own["edits"].items()}
    if isinstance(own.get("layers"), list):
        own["layers"] = [f"{stack}.{layer}" for layer in own["layers"]]
    if "attention" in own:
        own["attention"] = named(own["attention"], operation, layers)
    return own


def _lines(events: list[Any]) -> list[bytes]:
    return [line for event in events for line in bytes(event).splitlines() if line]


def difference(found: Any, expected: Any, place: str = "") -> float:
    """Return the largest difference of numbers. Raises ValueError that names the place where anything else differs."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        compared = [name for name in expected if name not in _NOT_COMPARED]
        return max((difference(found[name], expected[name], f"{place}.{name}") for name in compared), default=0.0)
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = zip(found, expected, strict=True)
        return max((difference(one, other, f"{place}.{at}") for at, (one, other) in enumerate(pairs)), default=0.0)
    if isinstance(expected, float) and isinstance(found, int | float):
        return abs(found - expected) / max(1.0, abs(expected))
    if found != expected:
        raise ValueError(f"at {place} is {found!s:.60}, where one process has {expected!s:.60}")
    return 0.0


def compare(kind: str, share: DeviceHeads, place: Path, dtype: str) -> dict[str, Any]:
    """Ask a model of two processes and one of one process the same."""
    folder = place / kind
    if share.rank == 0:
        model = built(kind)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    distributed.barrier()
    load = {
        "folder": str(folder),
        "dtype": dtype,
        "device": "cpu",
        "free_bytes": None,
        "threads": 1,
        "name": "m",
        "prefix_bytes": 0,
    }
    torch.manual_seed(3)
    try:
        spread = ServedModel.load(load, lambda _: None, share)
    except AttentionError as fault:
        return {"kind": kind, "refused": short_error(fault)}
    found: dict[str, Any] = {"kind": kind}
    answers: dict[str, Any] = {}
    for name, (operation, request) in QUESTIONS.items():
        try:
            answers[name] = answer(spread, operation, request)
        except Exception as fault:
            answers[name] = fault
    if share.rank:
        return found
    whole = ServedModel.load(load, lambda _: None)
    for name, (operation, request) in QUESTIONS.items():
        ours = answers[name]
        try:
            expected = answer(whole, operation, request)
        except Exception as fault:
            same = type(fault) is type(ours) and str(fault) == str(ours)
            found[name] = (
                f"refused: {short_error(fault)}"
                if same
                else f"in one process {short_error(fault)}; in two {ours!s:.200}"
            )
            continue
        try:
            found[name] = short_error(ours) if isinstance(ours, Exception) else difference(ours, expected)
        except ValueError as fault:
            found[name] = str(fault)
    return found


def take_part(rank: int, place: Path, walked: Sequence[str], dtype: str) -> None:
    """Compare these types as one of two processes; the first writes a line of JSON for each."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in walked:
            try:
                found = compare(kind, DeviceHeads(rank, 2), place, dtype)
            except Exception as fault:
                found = {"kind": kind, "fault": short_error(fault)}
            if not rank:
                print(json.dumps(found), flush=True)
        distributed.barrier()


def walk(walked: Sequence[str], dtype: str = "float64") -> Iterator[dict[str, Any]]:
    """Compare these types in two processes, which are ended and started again where they wait for each other."""
    left = [*walked]
    while left:
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "tools.models_walk.two_devices", "--place", place, "--dtype", dtype]
            alike = os.environ | {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}  # both take the same steps
            pair = [
                subprocess.Popen([*command, "--rank", str(rank), *left], stdout=subprocess.PIPE, text=True, env=alike)
                for rank in range(2)
            ]
            lines = SimpleQueue[str]()
            Thread(target=_read, args=(pair[0], lines), daemon=True).start()
            fault = "its process ended"
            try:
                while left and (line := lines.get(timeout=_PATIENCE_S)):
                    yield json.loads(line)
                    left.pop(0)
            except Empty:
                fault = "its two processes wait for each other"
            for process in pair:
                process.kill()
                process.wait()
        if left:
            yield {"kind": left.pop(0), "fault": fault}


def _read(process: "subprocess.Popen[str]", lines: "SimpleQueue[str]") -> None:
    for line in process.stdout or ():
        if line.startswith("{"):
            lines.put(line)
    lines.put("")


def main() -> None:
    """Compare the types that are named, or all that have a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--dtype", default="float64", help="in which nothing but the order of sums may differ")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        take_part(options.rank, options.place, options.kinds, options.dtype)
        return
    for found in walk(options.kinds or [kind for kind in kinds() if has_plan(kind)], options.dtype):
        print(json.dumps(found), flush=True)


def has_plan(kind: str) -> bool:
    """True if transformers has a plan for several devices for a type, or for the part of it that reads text."""
    try:
        config = small_config(kind)
    except Exception:  # one that transformers cannot make
        return False
    plans = "base_model_tp_plan", "base_model_ep_plan"
    return any(getattr(part, plan, None) for part in (config, config.get_text_config()) for plan in plans)


if __name__ == "__main__":
    main()
