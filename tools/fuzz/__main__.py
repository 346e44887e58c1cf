"""Fuzz every reader with atheris, then whole requests and damaged folders: ``python -m tools.fuzz --inputs 1000000``.

Exits with 1 if one of them has a fault. Each target of atheris runs in a process of its own, with coverage of the
contract and of the readers of bodies. Inputs that cover something new are kept in ``.cache/fuzz`` for the next run, and
an input at fault is written there.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.fuzz.folder_walk import FolderOutcome
    from tools.fuzz.request_walk import Outcome

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "fuzz"
SHARES = {
    "json_body": 20, "safetensors_body": 15, "safetensors_header": 20, "spec": 15, "tensor": 10, "frame": 10,
    "content_coding": 4, "negotiated_headers": 6,
}  # fmt: skip
"""Percent of all inputs, for each target."""
_SHOWN = 5
"""Faults of a walk that are printed."""
SECONDS, MEBIBYTES, LONGEST = 5, 2048, 4096
"""Limits of libFuzzer: seconds for one input, resident memory of the process, bytes of an input."""
KNOWN = '"query" "spec" "masks" "name" "dtype" "shape" "data" "base64" "data_offsets" "__metadata__" "request" "F32"'


def main() -> int:
    """Fuzz, print a table, return the exit status."""
    options = _options()
    if options.target:
        _fuzz(options.target, options.inputs, options.seed)
        return 0
    if options.situation is not None:
        from tools.fuzz.request_walk import walk_situations  # not before atheris instruments what it fuzzes

        return _say(walk_situations(options.seed, range(options.situation, options.situation + 1)))
    if options.form is not None:
        return int(_walk_folders(options.folders, options.loads, options.seed, [options.form]))
    print("| target | inputs | accepted | seconds | inputs/s | result |\n|---|---:|---:|---:|---:|---|")
    total, faults, started = 0, 0, time.monotonic()
    for target, share in SHARES.items():
        inputs = max(options.inputs * share // 100, 1)
        fault = _run(target, inputs, options.seed)
        total, faults = total + inputs, faults + fault
    faults += _walk(options.requests, options.seed)
    faults += _walk_folders(options.folders, options.loads, options.seed)
    seconds = time.monotonic() - started
    total += options.requests + options.folders + options.loads
    print(f"| all | {total:,} | | {seconds:.0f} | {total / seconds:,.0f} | {faults} faults |")
    return min(faults, 1)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--inputs", type=int, default=1_000_000, help="inputs of all targets together")
    made.add_argument(
        "--requests", type=int, default=20_000, help="whole requests through an engine, beside the inputs"
    )
    made.add_argument("--folders", type=int, default=6_000, help="damaged folders whose files are read")
    made.add_argument("--loads", type=int, default=300, help="damaged folders that are loaded whole")
    made.add_argument("--form", help="damage folders of this form alone, as in 'gguf llama'")
    made.add_argument("--situation", type=int, help="send the requests of this situation alone, in this process")
    made.add_argument("--target", help="fuzz this target alone, in this process")
    made.add_argument("--seed", type=int, default=1)
    return made.parse_args()


def _walk(requests: int, seed: int) -> bool:
    """Send whole requests and print their row. Returns True if there is a fault."""
    from tools.fuzz.request_walk import walk

    started = time.monotonic()
    outcome = walk(requests, seed)
    seconds, sent = time.monotonic() - started, outcome.counts.total()
    accepted = sent - outcome.counts["refused"] - outcome.counts["unexpected"]
    result = f"{len(outcome.faults)} faults" if outcome.faults else "sound"
    print(f"| whole requests | {sent:,} | {accepted:,} | {seconds:.0f} | {sent / seconds:,.0f} | {result} |")
    return bool(_say(outcome))


def _walk_folders(folders: int, loads: int, seed: int, forms: list[str] | None = None) -> bool:
    """Read damaged folders, load some, and print their rows. Returns True if there is a fault."""
    from tools.fuzz.folder_forms import FORMS, LOADED
    from tools.fuzz.folder_walk import ask_readers, walk_folders
    from tools.fuzz.load_walk import ask_loaded

    faulty = False
    walks = ("damaged folders", ask_readers, folders, FORMS), ("damaged loads", ask_loaded, loads, LOADED)
    for name, ask, count, all_forms in walks:
        if not count:
            continue
        started = time.monotonic()
        outcome = walk_folders(ask, count, seed, forms or list(all_forms))
        seconds, answered = time.monotonic() - started, outcome.counts["answered"]
        result = f"{len(outcome.faults)} faults" if outcome.faults else "sound"
        print(f"| {name} | {count:,} | {answered:,} | {seconds:.0f} | {count / seconds:,.0f} | {result} |", flush=True)
        faulty |= bool(_say(outcome))
    return faulty


def _say(outcome: "Outcome | FolderOutcome") -> int:
    """Print the counts and the faults of a walk. Returns the exit status."""
    sys.stderr.write(", ".join(f"{name}: {count:,}" for name, count in sorted(outcome.counts.items())) + "\n")
    for fault in outcome.faults[:_SHOWN]:
        sys.stderr.write(fault[-4000:] + "\n")
    return int(bool(outcome.faults))


def _run(target: str, inputs: int, seed: int) -> bool:
    """Fuzz one target in a process of its own and print its row. Returns True if it has a fault."""
    started = time.monotonic()
    command = [sys.executable, "-m", "tools.fuzz", "--target", target, "--inputs", str(inputs), "--seed", str(seed)]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    seconds = time.monotonic() - started
    found = FOLDER / f"{target}.json"
    count = Counter(json.loads(found.read_text())) if found.exists() else Counter()
    sound = ended.returncode == 0 and count["inputs"] >= inputs
    result = "sound" if sound else f"FAULT, status {ended.returncode}"
    rate = count["inputs"] / seconds
    numbers = f"{count['inputs']:,} | {count['accepted']:,} | {seconds:.0f} | {rate:,.0f}"
    print(f"| {target} | {numbers} | {result} |", flush=True)
    if not sound:
        sys.stderr.write(ended.stderr[-4000:])
    return not sound


def _fuzz(name: str, inputs: int, seed: int) -> None:
    """Hand this process over to libFuzzer, which ends it."""
    import atheris

    with atheris.instrument_imports(include=["attention_contract", "attention_service.api"]):
        from tools.fuzz import targets
    from tools.fuzz.seeds import bend, seeds

    FOLDER.mkdir(parents=True, exist_ok=True)
    corpus, count, target = FOLDER / name, Counter(inputs=0, accepted=0), targets.TARGETS[name]
    corpus.mkdir(exist_ok=True)
    for index, sound in enumerate(seeds(name)):
        (corpus / f"seed-{index}").write_bytes(sound)
    words = FOLDER / "words.txt"
    words.write_text("\n".join(f'"\\"{word.strip(chr(34))}\\""' for word in KNOWN.split()) + "\n")
    counts = FOLDER / f"{name}.json"
    counts.unlink(missing_ok=True)

    def take(data: bytes) -> None:
        accepted = target(data)
        count["inputs"] += 1
        count["accepted"] += accepted
        if count["inputs"] == inputs:
            counts.write_text(json.dumps(count))

    def mutate(data: bytes, size: int, at: int) -> bytes:
        rng = random.Random(at)
        bent = bend(data, rng) if rng.random() < 0.5 else None
        return atheris.Mutate(data, size) if bent is None or len(bent) > size else bent

    limits = [f"-timeout={SECONDS}", f"-rss_limit_mb={MEBIBYTES}", f"-max_len={LONGEST}"]
    choices = [
        f"-runs={inputs + 2}",
        f"-seed={seed}",
        f"-dict={words}",
        "-verbosity=0",
        f"-artifact_prefix={FOLDER}/{name}-",
    ]
    atheris.Setup([sys.argv[0], *limits, *choices, str(corpus)], take, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
