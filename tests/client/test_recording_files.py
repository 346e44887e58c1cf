"""Recordings without torch: files that are mapped and not read, and what is counted of them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from attention_client.recording import Recording
from attention_client.recording.mapped_tensors import MappedTensors
from attention_contract.schemas.recordings import RecordingFile


def resident_bytes(path: Path) -> int:
    """The bytes of a mapped file that are in memory for this process."""
    text = Path("/proc/self/smaps").read_text("utf-8")
    mapped = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", text)
    return sum(int(kilobytes) * 1024 for kilobytes in mapped)


def large_file(path: Path, heads=32, tokens=2048) -> Path:
    """Write the recording of a long text, half a gigabyte that takes no room on the disk."""
    shape, size = [heads, tokens, tokens], 4 * heads * tokens**2
    facts = {
        "model": "long", "text": "", "created": "2026-01-01T00:00:00Z", "tokens": {"layers": ["x"] * tokens},
        "attentions": [{"name": "layers.0", "heads": [str(head) for head in range(heads)]}],
    }  # fmt: skip
    header = json.dumps(
        {
            "__metadata__": {"recording": json.dumps(facts)},
            "layers.0.weights": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return path


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is resident of a mapped file")
def test_nothing_but_the_requested_slice_is_read(tmp_path):
    path = large_file(tmp_path / "long.safetensors")
    recording = Recording.load(path)
    after_header = resident_bytes(path)
    assert after_header < 2**20
    part = recording.read(0, heads=[3, 17], queries=slice(100, 104))
    assert part.shape == (2, 4, 2048)
    touched = resident_bytes(path) - after_header
    assert part.nbytes <= touched < 2**20  # the pages around 64 kB of 512 MB
    assert isinstance(recording.tensors, MappedTensors)


def test_entropy_leaves_out_queries_that_attend_to_nothing():
    rows = [[[0.5, 0.5], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    recording = Recording.of(
        RecordingFile(
            model="m", text="a b", created="2026-01-01T00:00:00Z", tokens={"layers": ["a", "b"]},
            attentions=[{"name": "layers.0", "heads": ["x", "y"]}], layers={"0.weights": np.array(rows)},
        )
    )  # fmt: skip
    np.testing.assert_allclose(recording.entropy(0), [np.log(2), np.nan])
    assert recording.top_keys(0, 1, 0) == []


def test_a_long_text_is_shown_within_limits(tmp_path):
    html = Recording.load(large_file(tmp_path / "long.safetensors"))._repr_html_()
    assert len(html) < 10_000
    assert "layers.0: 32 heads" in html
