"""Writers that are killed at random: every change that one acknowledged is in the store, bit for bit."""

import subprocess
import sys

import pytest

WRITERS = """
import json, multiprocessing, os, random, signal, sys, time
from pathlib import Path
import numpy as np, torch
from attention_contract.schemas.modules import CreateModule
from attention_service.core.tensors import to_numpy
from attention_service.modules.library import Library

root, operations, writers, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
NAMES = 3  # of each writer

def opened():
    library = Library(root, torch.device("cpu"))
    problems = library.load()
    assert not problems, problems
    return library

def write(writer, state, seed, told):
    # The state of a name is the seed of its creation and the number of its replacements, or None. Each change is told
    # before it begins and after it is acknowledged.
    library, rng = opened(), random.Random(seed)
    while True:
        name = f"w{writer}.{rng.randrange(NAMES)}"
        now = state.get(name)
        after = [rng.randrange(1000), 0] if now is None else rng.choice([None, [now[0], now[1] + 1]])
        os.write(told, json.dumps(["begin", name, after]).encode() + b"\\n")
        if now is None:
            library.create(CreateModule(name=name, config={"d_model": 8, "num_heads": 2}, seed=after[0]))
        elif after is None:
            library.delete(name)
        else:
            library.replace(name, content(after))
        os.write(told, json.dumps(["end", name, after]).encode() + b"\\n")
        state[name] = after

def content(at):
    scratch = Library(root.parent / "nowhere", torch.device("cpu"))
    module, _ = scratch.create(
        CreateModule(name="m", config={"d_model": 8, "num_heads": 2}, seed=at[0], durable=False)
    )
    return {name: to_numpy(value) + np.float32(at[1]) for name, value in module.parameters.items()}

def same(module, at):
    if module is None or at is None:
        return module is None and at is None
    found = {name: to_numpy(value) for name, value in module.parameters.items()}
    return all(found[name].tobytes() == value.tobytes() for name, value in content(at).items())

rng, done, acknowledged = random.Random(seed), 0, 0
states = [{} for _ in range(writers)]
while done < operations or not acknowledged:
    children = []
    for writer in range(writers):
        reading, told = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            try:
                write(writer, states[writer], rng.randrange(2**30) + writer, told)
            finally:
                os._exit(1)
        os.close(told)
        children.append((child, reading))
    # The wait is by the changes of one writer, since a busy machine makes none in a given time.
    awaited, heard = rng.choice(children)[1], b""
    wanted = rng.randrange(3)
    while heard.count(b'"end"') < wanted and (more := os.read(awaited, 65536)):
        heard += more
    time.sleep(rng.uniform(0.02, 0.12))
    rng.shuffle(children)
    for child, _ in children:
        os.kill(child, signal.SIGKILL)
        time.sleep(rng.uniform(0, 0.005))
        os.waitpid(child, 0)
    library = opened()
    found = {module.name: module for module in library.list()}
    for child, reading in children:
        with os.fdopen(reading, "rb") as lines:
            text = (heard if reading == awaited else b"") + lines.read()
        events = [json.loads(line) for line in text.splitlines()]
        for what, name, after in events:
            writer = int(name[1 : name.index(".")])
            if what == "end":
                states[writer][name] = after
                acknowledged += 1
        done += sum(what == "begin" for what, _, _ in events)
        if events and events[-1][0] == "begin":  # killed within a change
            _, name, after = events[-1]
            if same(found.get(name), after):
                states[int(name[1 : name.index(".")])][name] = after
    expected = {name: at for state in states for name, at in state.items()}
    for name in {*found, *expected}:
        assert same(found.get(name), expected.get(name)), (name, found.get(name), expected.get(name))
    stray = [path for path in (root / "modules").rglob("*") if path.name.startswith(".")]
    assert not stray, stray
print(done, acknowledged)
"""


def run(root, operations, writers, seed):
    """Return the numbers of changes that began, and that were acknowledged."""
    # A separate process is single-threaded, so it can fork.
    command = [sys.executable, "-c", WRITERS, str(root), *map(str, (operations, writers, seed))]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return tuple(map(int, ended.stdout.split()))


@pytest.mark.slow
def test_a_few_changes_of_killed_writers_are_all_there(tmp_path):
    done, acknowledged = run(tmp_path / "models", 15, 3, 0)
    assert done >= 15
    assert acknowledged


@pytest.mark.slow
def test_many_changes_of_killed_writers_are_all_there(tmp_path):
    done, acknowledged = run(tmp_path / "models", 500, 4, 1)
    assert done >= 500
    assert acknowledged > 100
