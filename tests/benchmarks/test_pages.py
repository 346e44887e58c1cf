"""Each page at its smallest, and what it says."""

import sys
import time
from copy import deepcopy
from itertools import islice
from types import SimpleNamespace

import benchmarks.__main__ as quick_set
import numpy as np
import pytest
import torch
from benchmarks.generation import letters
from benchmarks.measure import Case, measure, rows
from benchmarks.page import publish
from benchmarks.peers.entries import PEERS, entries, versions
from benchmarks.peers.environments import Environment
from benchmarks.processes import ROOT, ServerError
from benchmarks.workloads import Workload
from transformers import AlbertConfig, AutoModelForMaskedLM

from attention_contract.schemas.model_requests import ModelWeightsRequest
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device
from benchmarks import (
    admission,
    client,
    contestants,
    demanding,
    holding,
    kernels,
    long_inspection,
    models,
    package_calls,
    questions,
    scaling,
    serving,
    tables,
    training,
    wire,
)

DOCUMENT = (ROOT / "benchmarks" / "README.md").read_text("utf-8")


def test_a_ratio_is_that_of_the_times():
    case = Case("long", lambda: time.sleep(0.02), "short", lambda: time.sleep(0.004))
    found = measure(case, 5)
    assert found.rounds == 5
    assert 1.5 < found.ratio < 6
    assert found.low <= found.ratio <= found.high


def test_a_long_case_gets_fewer_rounds():
    pause = Case("long", lambda: time.sleep(0.01), "long", lambda: time.sleep(0.01))
    assert measure(pause, 1000, most_seconds=0.1).rounds < 20


def test_kernels(capsys):
    lines = "\n".join(kernels.tables((32, 64), Device.open("cpu"), 3))
    for title in ("Forward", "Windows", "Gradients", "Taps"):
        assert f"## {title}" in lines
    assert "forward, causal, n = 64, 8 heads" in lines
    assert lines.count("bare autograd") == 4


def test_wire():
    lines = list(rows(wire.cases(), 3))
    assert [line.split(",")[0] for line in lines[1:]] == ["| read nested lists", "| read base64", "| read safetensors"]


@pytest.mark.slow
def test_admission():
    lines = list(rows(islice(admission.cases(), 2), 3))
    assert [line.split(" | ")[0] for line in lines[1:]] == [f"| {name}" for name in islice(admission.requests(), 2)]


@pytest.mark.slow
def test_what_keeps_others_waiting(server):
    port = int(server.rpartition(":")[2])
    head, *found = holding.lines(port, 2, "one length")
    rows = [row.split(" | ") for row in found]
    assert [row[0] for row in rows] == ["| complexity, one length"]
    assert rows[0][1] == "200"
    assert len(rows[0]) == head.splitlines()[0].count("|") - 1
    assert 0 < float(rows[0][-1].removesuffix(" |")) < 1e4


@pytest.mark.slow
def test_each_request_is_what_its_name_says():
    requests = list(demanding.demanding())
    assert len({one.name for one in requests}) == len(requests)
    assert max(len(one.body) for one in requests) > 2**23
    assert all(len(one.body) < 2**18 for one in requests if "draws" in one.name)


def test_a_package_finds_the_numbers_of_the_service():
    """Both sides of a row are asked for the same: weights, and statistics of texts of unlike lengths."""
    torch.manual_seed(0)
    made = AutoModelForMaskedLM.from_config(AlbertConfig(**package_calls.CONFIG), attn_implementation="eager").eval()
    loaded = LoadedModel("albert", deepcopy(made).requires_grad_(False), letters(), Device.open("cpu"))
    texts, package = package_calls.texts_of(0, [9, 5, 7]), package_calls.Package(made)
    asked = ModelWeightsRequest(tokens=texts, statistics=[*package_calls.STATISTICS])
    layers = weights_reply(loaded, asked).layers
    for name, theirs in package.survey(texts, 2).items():
        np.testing.assert_allclose(
            theirs, np.stack([getattr(layer.statistics, name) for layer in layers], 1), atol=1e-5
        )
    for row, text in enumerate(texts):
        ours = np.stack([layer.weights[row] for layer in layers])[..., : len(text), : len(text)]
        np.testing.assert_allclose(package.weights([text])[:, 0], ours, atol=1e-5)


@pytest.mark.slow
def test_growth_of_what_is_served(tmp_path, monkeypatch, sockets):
    monkeypatch.setattr(scaling, "NAMES", (contestants.UNBATCHED, contestants.BATCHING))
    monkeypatch.setattr(scaling, "BASE", scaling.Workload("tiny", 1, 8, 16, 2, seconds=0.2))
    sweeps = (scaling.Sweep("Length", "n", "length", (4, 8)), scaling.Sweep("Concurrency", "c", "", (1, 2)))
    monkeypatch.setattr(scaling, "SWEEPS", sweeps)
    page = "\n".join(scaling.measured(1, tmp_path, tmp_path / "picture.svg", quick=False))
    assert page.count("∝ n^") == page.count("∝ c^") == len(scaling.NAMES)
    assert "requests/s" in page
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")


def test_the_exponent_is_the_slope_of_the_larger_half():
    cells = {n: SimpleNamespace(loads=[SimpleNamespace(p50_ms=max(10, n**2))]) for n in (1, 2, 8, 16)}
    assert scaling.exponent(cells) == pytest.approx(2)


@pytest.mark.slow
def test_serving_writes_its_page(tmp_path, monkeypatch, capsys, sockets):
    output = tmp_path / "page.md"
    options = [
        "--quick",
        "--workload",
        "W1",
        "--concurrency",
        "1",
        "--rounds",
        "1",
        "--seconds",
        "0.2",
        "--form",
        "json",
    ]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options, "--output", str(output)])
    serving.main()
    page = output.read_text()
    assert page.strip() in capsys.readouterr().out
    assert "| 1 | **attention serve** | JSON |" in page
    assert "bare ASGI, orjson" in page
    assert "--concurrency 1" in page
    assert "raw" not in page


def test_a_page_says_what_it_says_on_the_screen(tmp_path, capsys):
    publish("Title", "Text.", iter([tables.table(["a", "b"], [["x", "1"]])]), tmp_path / "folder" / "page.md")
    page = (tmp_path / "folder" / "page.md").read_text()
    assert page.startswith("# Title\n\nText.\n")
    assert "| a | b |\n| --- | ---: |\n| x | 1 |\n" in page
    assert page.strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (99.94, "99.9"), (1.234, "1.23"), (0.0123, "0.012"), (0, "0.000")]
)
def test_numbers_have_three_digits(value, text):
    assert tables.short(value) == text


def test_the_document_names_every_page_and_peer():
    for page in (*quick_set.PAGES, "peers"):
        assert f"`{page}.md`" in DOCUMENT
    for name, *_ in PEERS:
        assert name in DOCUMENT


def test_every_peer_has_its_program_and_a_pinned_version():
    for name, environment, program, *_ in PEERS:
        assert (ROOT / "benchmarks" / "peers" / f"{program}.py").exists(), name
        assert "==" in environment.packages[0]
        assert environment.packages[0] in versions()
        assert {entry.server.peer for entry in entries([name])} == {True}


def test_a_peer_that_cannot_be_installed_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.environments.CACHE", tmp_path)
    base = tmp_path / "python"
    base.write_text("#!/bin/sh\necho no wheel for this machine >&2\nexit 1\n")
    base.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ServerError, match="could not be installed: no wheel for this machine"):
        Environment("nowhere", ("nothing==1",), str(base)).install()


@pytest.mark.slow
def test_clients():
    tiny = Workload("tiny", 1, 4, 8, 2, concurrency=(1, 2))
    lines = "\n".join(client.sections(tiny, 1))
    assert "## tiny" in lines
    for name in ("Client", "AsyncClient"):
        assert f"| {name} |" in lines


@pytest.mark.slow
def test_questions(tmp_path):
    lines = list(questions.rows((12,), 1, tmp_path))
    assert [line.split("|")[1].strip() for line in lines[1:]] == [
        f"{name}, 12 tokens"
        for name in ("forward", "weights", "statistics", "entropy", "every statistic", "eager, weights")
    ]


@pytest.mark.slow
def test_models(tmp_path):
    lines = list(rows(models.cases((12,), tmp_path, 1), 2))
    assert [line.split("|")[1].strip() for line in lines[1:]] == [
        "weights, 12 tokens", "weights over HTTP, 12 tokens", "forward, 12 tokens",
        "integrated gradients, 64 points, 12 tokens",
    ]  # fmt: skip


def test_long_inspection():
    planned, held, weights, predicted, took = (float(cell) for cell in long_inspection.row(512, 2)[1:])
    assert planned > 0
    assert held >= 0
    assert weights == 1.0
    assert predicted > 0
    assert took > 0


@pytest.mark.slow
def test_training():
    lines = "\n".join(training.lines([(4, 8, 2)], 1))
    assert lines.count("| 4 × 8 |") == 2
    assert "PUT durable ms" in lines
