"""Make the recordings that the page ships with: MiniLM's way through one sentence, and a trained toy's, as float16.

::

    python web/make_recording.py      needs the extras server and transformers; fetches MiniLM as ``make demo`` does

The weights come first in the file, so that the page's first request brings them with the header.
"""

import json
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import transformers

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "examples")]

from induction_toy import record_toy  # noqa: E402

from attention_client.recording import Recording, record  # noqa: E402 - behind the path
from demo_parts import minilm  # noqa: E402

SENTENCE = "The cat sat on the mat because it was tired."
ORDER = ("weights", "q", "k", "v", "hidden", "embeddings")
TARGET = ROOT / "web/public/recordings/cat.safetensors"
TOY = TARGET.with_name("toy.safetensors")


def main() -> None:
    """Make the files."""
    save(TOY, *record_toy())
    folder = minilm.fetch()
    model = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as scratch:
        recording = recorded(model, tokenizer, Path(scratch))
    facts = recording.facts.model_dump(mode="json") | {"model": "all-MiniLM-L6-v2"}
    save(TARGET, facts, recording.tensors)


def save(path: Path, facts: dict[str, object], tensors: Mapping[str, np.ndarray]) -> None:
    """Write a recording as float16, its weights first."""
    names = sorted(tensors, key=lambda name: (ORDER.index(name.rpartition(".")[2]), name))
    write(path, facts, {name: np.asarray(tensors[name], "<f2") for name in names})
    print(path, path.stat().st_size)


def recorded(model: transformers.PreTrainedModel, tokenizer: object, scratch: Path) -> Recording:
    """Record the sentence with a server of its own."""
    from attention_client import Client  # noqa: PLC0415
    from demo_parts.service import serving  # noqa: PLC0415

    model.save_pretrained(scratch / "model")
    with serving(scratch / "model") as (url, _), Client(url) as client:
        return record(model, tokenizer, SENTENCE, taps=["weights", "q", "k", "v"], client=client)


def write(path: Path, facts: dict[str, object], tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file with its tensors in this order."""
    header: dict[str, object] = {"__metadata__": {"recording": json.dumps(facts, ensure_ascii=False)}}
    at = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F16", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))


if __name__ == "__main__":
    main()
