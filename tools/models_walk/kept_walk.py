"""A walk whose results are kept in a file as they come, so that it can go on after an interruption."""

import hashlib
import json
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from tools.docs.snippets import ROOT
from tools.models_walk.compared import limited
from tools.models_walk.found import Found
from tools.models_walk.model_types import prepare

_CODE = ("client/attention_transformers", "service/attention_service/models", "tools/models_walk")
_DIED = 2
"""The times that a process may end while it compares a type, until the type counts as one that ends it."""


def code_of_walk():
    """Return a digest of the code that a walk compares, and of what it compares with."""
    found = hashlib.sha256(f"{version('transformers')} {version('torch')}".encode())
    for folder in _CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


class KeptWalk:
    """What a walk has found, by type, in a file of lines of JSON whose first says of which code."""

    def __init__(self, file: Path, device: str, *, resumes: bool, code: str | None = None) -> None:
        self._file, self.device = file, device
        self.found: dict[str, Found] = {}
        head = {"code": code or code_of_walk(), "device": device}
        if resumes and file.exists():
            first, *lines = file.read_text("utf-8").splitlines()
            if json.loads(first) == head:
                results = [Found(**json.loads(line)) for line in lines if line.endswith("}")]
                self.found = {each.kind: each for each in results}
                return
            print(f"{file} is of other code or another device: the walk begins anew")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(head) + "\n", "utf-8")

    def add(self, each: Found) -> None:
        """Keep what was found of a type."""
        self.found[each.kind] = each
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(each)) + "\n")


def spawned(jobs):
    """Return processes that compare types."""
    return ProcessPoolExecutor(jobs, get_context("spawn"), prepare)


def walk(kinds, kept, jobs, compare=limited, workers=spawned):
    """Compare each type that is not known yet. Returns what was found of all, in their order."""
    died = Counter()
    while waiting := [kind for kind in kinds if kind not in kept.found]:
        # One that ended its process before is compared alone, so that it ends no other.
        at_once = [kind for kind in waiting if not died[kind]] or waiting[:1]
        with workers(min(jobs, len(at_once))) as pool:
            running = {}
            try:
                while at_once or running:
                    while at_once and len(running) < jobs:
                        kind = at_once.pop(0)
                        running[pool.submit(partial(compare, device=kept.device), kind)] = kind
                    for done in wait(running, return_when=FIRST_COMPLETED).done:
                        each = done.result()
                        del running[done]
                        kept.add(each)
                        print(f"{len(kept.found)}/{len(kinds)} {each}", flush=True)
            except BrokenProcessPool:
                for kind in running.values():
                    died[kind] += 1
                    if died[kind] >= _DIED:
                        kept.add(Found(kind, reasons={"whole": "fault: its process ended"}))
    return [kept.found[kind] for kind in kinds]
