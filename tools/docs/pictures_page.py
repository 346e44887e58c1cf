"""Drawer of the pictures of ``docs/pictures.md``: ``python -m tools.docs.pictures_page`` writes them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.conftest import live_server

from attention_client import Client
from attention_client.recording import Recording
from tools.docs.snippets import ROOT, SERVER_SETTINGS

FOLDER = ROOT / "docs" / "pictures"
CAT = ROOT / "service" / "attention_service" / "web" / "recordings" / "cat.safetensors"
HEAD = 5


def pictures(client: Client) -> Iterator[tuple[str, bytes]]:
    """Yield each picture's file name and content."""
    cat = Recording.load(CAT)
    words, _ = cat.tokens(0)
    given: dict[str, Any] = {name: cat.read(0, tap).astype(np.float32) for name, tap in (("query", "q"), ("key", "k"))}
    given |= {"labels": words, "query_labels": words, "headers": {"X-Request-ID": "docs"}}
    edits = [{"tap": "scores", "keys": [0, len(words) - 1], "set": -100}]
    weights = client.attention.weights
    yield "heads.svg", client.plot(width=900).of(weights, **given).data
    dark = client.plot("png", view="head", head=HEAD, theme="dark", palette="magma", width=700)
    yield "head.png", dark.of(weights, **given).data
    yield "lines.svg", client.plot(view="lines", head=HEAD, width=500).of(weights, **given).data
    changed = client.plot(view="head", head=HEAD, width=700)
    yield "differences.svg", changed.of(weights, **given, edits=edits, compare="unedited").data
    value = {"value": cat.read(0, "v").astype(np.float32)}
    attributed = client.plot(view="head", head=HEAD, width=700)
    yield "attribution.svg", attributed.of(client.attention.attribution, **given, **value, methods=["integrated"]).data
    swept: dict[str, Any] = {name: given[name] for name in ("query", "key", "headers")} | value
    hidden = {"tap": "weights", "over": ["heads", "keys"], "set": 0}
    yield "effects.svg", client.plot(width=700).of(client.attention.effects, **swept, sweep=hidden).data
    for at in (0, 1):
        client.modules.create(f"layer{at}", {"d_model": 64, "num_heads": 4}, seed=at)
    circuits, named = client.circuits, {"headers": {"X-Request-ID": "docs"}}
    yield "spectra.svg", client.plot(width=700).of(circuits, "layer0", **named).data
    scores = client.plot(view="composition", width=700)
    yield "composition.svg", scores.of(circuits, "layer0", with_="layer1", **named).data
    stored = client.recordings.create(cat)
    layers = client.plot(width=900)
    yield "statistics.svg", layers.of(
        client.recordings.statistics, stored.id, statistics=["entropy", "previous_token", "own_position"],
        headers={"X-Request-ID": "docs"},
    ).data  # fmt: skip
    traced = client.plot(width=700)
    yield "rollout.svg", traced.of(client.recordings.rollout, stored.id, headers={"X-Request-ID": "docs"}).data
    pairs = client.plot(width=760)
    yield "similarity.svg", pairs.of(client.recordings.similarity, stored.id, headers={"X-Request-ID": "docs"}).data


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        live_server(Path(folder), **SERVER_SETTINGS) as url,
        Client(url) as client,
    ):
        for name, content in pictures(client):
            (FOLDER / name).write_bytes(content)
