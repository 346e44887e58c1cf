"""Checkpoints that a server fetches from a hub: progress, sharing, cancelling, and all that goes wrong on the way."""

import json
import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from attention_client import (
    AsyncClient,
    CheckpointNotFound,
    Client,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidCheckpoint,
    InvalidRequest,
    Overloaded,
    StoreFull,
    Unavailable,
)
from attention_client.cli.commands import model_commands
from tests.api.hub import COMMIT, hub, hub_of_this_process
from tests.api.processes import process
from tests.conftest import eventually, live_server

pytest.importorskip("huggingface_hub")
MEGABYTE = 2**20
FILES = ["config.json", "model.safetensors", "spiece.model"]


def save_net(folder):
    """Save the attention of one layer of a GPT-2 with 4 MB of embeddings, and what is not to be fetched."""
    folder.mkdir(parents=True)
    at = "transformer.h.0.attn"
    tensors = {f"{at}.c_attn.weight": torch.ones(8, 24), f"{at}.c_attn.bias": torch.ones(24)}
    tensors |= {f"{at}.c_proj.weight": torch.ones(8, 8), f"{at}.c_proj.bias": torch.ones(8)}
    save_file(tensors | {"transformer.wte.weight": torch.rand(MEGABYTE)}, folder / "model.safetensors")
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "spiece.model").write_bytes(b"a tokenizer")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (folder / "modeling.py").write_text("raise SystemExit\n")


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    save_net(folder / "org" / "net")
    for other in "abcde":
        shutil.copytree(folder / "org" / "net", folder / "org" / other)
    (folder / "org" / "pickled").mkdir()
    (folder / "org" / "pickled" / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    for name, shard, content in (("indexed", "notes.txt", b"a secret"), ("unlike", "part.safetensors", b"a secret")):
        shutil.copytree(folder / "org" / "net", folder / "org" / name / "second")
        index = json.dumps({"metadata": {}, "weight_map": {"x": shard}})
        (folder / "org" / name / "second" / "model.safetensors.index.json").write_text(index)
        (folder / "org" / name / "second" / shard).write_bytes(content)
    shutil.copytree(folder / "org" / "net", folder / "org" / "large")
    save_file({"x": torch.zeros(20 * MEGABYTE)}, folder / "org" / "large" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The model repository and the address of a server that may ask the hub."""
    store = tmp_path_factory.mktemp("models")
    with live_server(store, hub=True, hub_limit=100 * MEGABYTE) as url:
        yield store, url


@pytest.fixture
def net(mirror, server):
    """The hub, the model repository without checkpoints, and a client."""
    store, url = server
    with hub(mirror) as served, hub_of_this_process(served.address), Client(url, retries=0) as client:
        yield served, store, client
        served.go_on.set()
        for path in client.server.info().hub.fetching:
            client.checkpoints.cancel_fetch(path)
        eventually(lambda: not leftovers(store))
    shutil.rmtree(store / "org", ignore_errors=True)


def leftovers(store):
    """Folders of fetches that are not complete."""
    return list(store.glob(".fetch-*"))


def half(client):
    """The progress of the net, once half of it has come."""

    def come():
        found = client.checkpoints.list().checkpoints
        return [each for each in found if each.fetch is not None and each.fetch.bytes >= MEGABYTE]

    return eventually(come)[0]


def test_a_fetch_tells_its_progress_and_what_it_will_be(net):
    served, store, client = net
    served.go_on.clear()
    seen = []
    with ThreadPoolExecutor(1) as beside:
        fetched = beside.submit(client.checkpoints.fetch, "org/net", on_progress=seen.append)
        coming = half(client)
        assert client.server.info().hub.fetching == ["org/net"]
        assert client.checkpoints.get("org/net").fetch.total_bytes == coming.bytes
        assert "being fetched" in coming.problem
        assert "org/net" not in {model.checkpoint for model in client.models.list().data}
        assert not (store / "org").exists()
        served.go_on.set()
        found = fetched.result(20)
    sizes = sum((store / "org" / "net" / file).stat().st_size for file in FILES)
    facts = coming.fetch
    assert (facts.revision, facts.total_bytes, facts.files, facts.total_files) == (COMMIT, sizes, 1, 3)
    assert MEGABYTE <= facts.bytes < sizes
    assert seen == sorted(seen, key=lambda progress: progress.bytes)
    assert (found.path, found.family, found.fetch, found.problem) == ("org/net", "gpt2", None, None)
    assert sorted(file.name for file in (store / "org" / "net").iterdir()) == FILES == sorted(served.taken)
    assert client.checkpoints.fetch("org/net") == found  # there already
    assert len(served.taken) == 3
    assert client.server.info().hub.fetching == []


@pytest.mark.slow
def test_a_caller_who_does_not_wait_asks_again(net, server):
    served, _, _ = net
    served.go_on.clear()
    body = {"repository": "org/net", "wait_s": 0}
    with httpx.Client(base_url=server[1]) as http:
        assert http.post("/v1/checkpoints", json=body).json()["fetch"]["bytes"] == 0
        served.go_on.set()
        reply = http.post("/v1/checkpoints", json=body | {"wait_s": 20})
    assert (reply.status_code, reply.json().get("fetch"), reply.json()["layers"]) == (200, None, 1)


def test_those_who_ask_for_the_same_share_its_fetch_and_none_ends_it_for_others(net, server):
    served, _, client = net
    served.go_on.clear()
    with pytest.raises(DeadlineExceeded):
        client.checkpoints.fetch("org/net", timeout=0.5)
    with pytest.raises(httpx.ReadTimeout):  # a caller who is lost
        httpx.post(f"{server[1]}/v1/checkpoints", json={"repository": "org/net"}, timeout=0.5)
    with ThreadPoolExecutor(2) as beside:
        both = [beside.submit(client.checkpoints.fetch, "org/net") for _ in range(2)]
        half(client)
        with pytest.raises(Conflict, match="at revision main"):
            client.checkpoints.fetch("org/net", revision=COMMIT)
        served.go_on.set()
        assert [each.result(20).layers for each in both] == [1, 1]
    assert sorted(served.taken) == FILES


@pytest.mark.slow
def test_a_cancelled_fetch_leaves_nothing_and_can_be_begun_again(net):
    served, store, client = net
    served.go_on.clear()
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(client.checkpoints.fetch, "org/net")
        half(client)
        client.checkpoints.cancel_fetch("org/net")
        with pytest.raises(Conflict, match="was cancelled"):
            waiting.result(20)
    assert [each.path for each in client.checkpoints.list().checkpoints] == ["tiny"]  # it ships
    for path in ("org/net", "nothing"):
        with pytest.raises(CheckpointNotFound):
            client.checkpoints.cancel_fetch(path)
    served.go_on.set()  # the thread of the fetch sees that it is to stop with the next bytes
    eventually(lambda: not leftovers(store))
    assert not (store / "org").exists()
    assert client.checkpoints.fetch("org/net").layers == 1
    with pytest.raises(CheckpointNotFound, match="is being fetched"):  # what is there is not deleted
        client.checkpoints.cancel_fetch("org/net")


@pytest.mark.slow
async def test_the_awaited_client_sees_progress_too(net, server):
    served, _, _ = net
    served.go_on.clear()
    seen = []

    def note(progress):
        seen.append(progress)
        served.go_on.set()

    async with AsyncClient(server[1]) as own:
        assert (await own.checkpoints.fetch("org/net", on_progress=note)).layers == 1
    assert seen[0].total_files == 3


@pytest.mark.slow
def test_an_interrupt_of_the_command_cancels_the_fetch(net, monkeypatch):
    served, store, client = net
    served.go_on.clear()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rich.progress.Progress.update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model_commands.fetch_shown(client, "org/net")
    assert client.server.info().hub.fetching == []
    served.go_on.set()
    eventually(lambda: not leftovers(store))


def test_what_is_too_large_is_refused_before_a_byte_of_it_comes(net, monkeypatch):
    served, store, client = net
    served.claimed = 101 * MEGABYTE
    with pytest.raises(StoreFull, match="hub_limit allows 104857600 bytes") as error:
        client.checkpoints.fetch("org/net")
    assert error.value.facts["actual"] > 101 * MEGABYTE
    served.claimed = 0
    usage = shutil.disk_usage(store)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=MEGABYTE))
    with pytest.raises(StoreFull, match="the disk has 1048576 bytes left"):
        client.checkpoints.fetch("org/net")
    assert served.taken == []
    assert not (store / "org").exists()


@pytest.mark.slow
def test_fetches_fit_onto_the_disk_together(net, monkeypatch):
    served, store, client = net
    usage = shutil.disk_usage(store)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5 * MEGABYTE))
    served.go_on.clear()
    with ThreadPoolExecutor(1) as beside:
        fetched = beside.submit(client.checkpoints.fetch, "org/net")
        progress = half(client).fetch
        with pytest.raises(StoreFull, match=r"beside the \d+ that other fetches will take") as error:
            client.checkpoints.fetch("org/a")
        served.go_on.set()
        assert fetched.result(20).layers == 1
    left = progress.total_bytes - progress.bytes
    assert error.value.facts["limit"] == pytest.approx(5 * MEGABYTE - left, abs=MEGABYTE)
    assert client.checkpoints.fetch("org/a").layers == 1


def test_a_download_that_breaks_goes_on_where_it_was(net):
    served, store, client = net
    served.cuts = 1
    assert client.checkpoints.fetch("org/net").layers == 1
    (range_,) = served.ranges
    assert MEGABYTE <= int(range_.removeprefix("bytes=").removesuffix("-")) < 3 * MEGABYTE
    original = served.taken.count("model.safetensors")
    assert original == 2
    assert (store / "org" / "net" / "model.safetensors").stat().st_size > 4 * MEGABYTE


@pytest.mark.parametrize(
    ("fault", "error", "detail"),
    [
        ({"broken": True}, Unavailable, "cannot be reached for 'org/net'"),
        ({"damaged": True}, InvalidCheckpoint, "model.safetensors of org/net came damaged"),
    ],
    ids=["broken", "damaged"],
)
def test_a_fetch_that_fails_leaves_nothing(net, fault, error, detail):
    served, store, client = net
    for name, value in fault.items():
        setattr(served, name, value)
    with pytest.raises(error, match=detail):
        client.checkpoints.fetch("org/net")
    assert [each.path for each in client.checkpoints.list().checkpoints] == ["tiny"]  # it ships
    assert leftovers(store) == []
    assert not (store / "org").exists()


@pytest.mark.sampled(repository=1, revision=1, error=1, detail=1)
@pytest.mark.parametrize(
    ("repository", "revision", "error", "detail"),
    [
        ("org/none", None, CheckpointNotFound, "no repository 'org/none'"),
        ("org/net", "other", CheckpointNotFound, "at revision 'other'"),
        ("org/pickled", None, InvalidCheckpoint, "has no safetensors file"),
    ],
)
def test_what_the_hub_does_not_have_is_reported(net, repository, revision, error, detail):
    served, store, client = net
    with pytest.raises(error, match=detail):
        client.checkpoints.fetch(repository, revision=revision)
    assert served.taken == []
    assert leftovers(store) == []


@pytest.mark.sampled(repository=1, detail=1)
@pytest.mark.parametrize(
    ("repository", "detail"),
    [("indexed", "names 'notes.txt' as a file"), ("unlike", "part.safetensors is not a readable")],
)
def test_an_index_that_names_no_file_of_tensors_is_not_fetched(net, repository, detail):
    _, store, client = net
    with pytest.raises(InvalidCheckpoint, match=detail):
        client.checkpoints.fetch(f"org/{repository}")
    assert leftovers(store) == []
    assert not (store / "org").exists()


@pytest.mark.slow
def test_a_fetch_stops_at_the_size_that_the_hub_lists(net, mirror):
    served, store, client = net
    served.hidden = 79 * MEGABYTE
    (size,) = (file.stat().st_size for file in (mirror / "org/large").glob("*.safetensors"))
    with pytest.raises(InvalidCheckpoint, match=r"more of .* than the bytes that it lists"):
        client.checkpoints.fetch("org/large")
    assert served.sent < size
    assert leftovers(store) == []


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", ["../up.json", "/etc/up.json", "a/../../up.json", "a//up.json"])
def test_a_file_that_the_hub_lists_elsewhere_is_refused_by_its_name(net, name):
    served, store, client = net
    served.stray = name
    with pytest.raises(InvalidCheckpoint, match="expected a path inside the repository"):
        client.checkpoints.fetch("org/net")
    assert served.taken == []
    assert leftovers(store) == []


@pytest.mark.sampled(repository=1)
@pytest.mark.parametrize("repository", ["org/a..b", "org/a--b", "org/a.git", "org/a."])
def test_a_name_that_no_repository_has_is_reported_as_such(net, repository):
    with pytest.raises(InvalidRequest, match="no repository has such a name") as caught:
        net[2].checkpoints.fetch(repository)
    assert caught.value.param == "repository"


@pytest.mark.slow
def test_only_some_are_fetched_at_a_time(net, server):
    served, _, client = net
    served.go_on.clear()
    with httpx.Client(base_url=server[1]) as http:
        for name in "abcd":
            http.post("/v1/checkpoints", json={"repository": f"org/{name}", "wait_s": 0}).raise_for_status()
    with pytest.raises(Overloaded, match="4 checkpoints are being fetched"):
        client.checkpoints.fetch("org/e")


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_fetch_and_leftovers_of_a_crash_are_removed(mirror, tmp_path):
    left = tmp_path / ".fetch-00"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with hub(mirror) as served, hub_of_this_process(served.address):
        served.go_on.clear()
        with live_server(tmp_path, hub=True) as url:
            assert not left.exists()
            httpx.post(f"{url}/v1/checkpoints", json={"repository": "org/net", "wait_s": 0}).raise_for_status()
            with Client(url) as client:
                half(client)
            (own,) = leftovers(tmp_path)
            with live_server(tmp_path) as other, Client(other, retries=0) as client:
                assert own.exists()  # a server that starts meanwhile leaves it alone
                with pytest.raises(Forbidden, match="ATTENTION_HUB=true"):
                    client.checkpoints.fetch("org/net")
                assert "ATTENTION_HUB=true" in client.server.info().hub.problem
            began = time.monotonic()
        assert time.monotonic() - began < 5
        served.go_on.set()
        eventually(lambda: not leftovers(tmp_path))
    assert not (tmp_path / "org").exists()


def test_the_suggestions_are_pinned_and_those_of_the_documents(server):
    with Client(server[1]) as client:
        facts = client.server.info().hub
    assert facts.problem is None
    assert facts.limit_bytes == 100 * MEGABYTE
    assert {each.repository for each in facts.models} >= {"openai-community/gpt2", "HuggingFaceTB/SmolLM2-135M"}
    assert all(len(each.revision) == 40 and each.license and each.bytes > 50 * MEGABYTE for each in facts.models)
    page = (Path(__file__).parents[2] / "docs/models.md").read_text("utf-8")
    rows = [f"| `{m.repository}` | {m.about} | {round(m.bytes / 1e6)} MB | {m.license} |" for m in facts.models]
    assert all(row in page for row in rows)


@pytest.mark.slow
def test_a_killed_server_begins_again(mirror, tmp_path):
    with hub(mirror) as served:
        served.go_on.clear()
        with process(tmp_path, "--hub", "true", HF_ENDPOINT=served.address) as (running, url):
            httpx.post(f"{url}/v1/checkpoints", json={"repository": "org/net", "wait_s": 0}).raise_for_status()
            with Client(url) as client:
                half(client)
            running.kill()
            running.wait()
        assert len(leftovers(tmp_path)) == 1
        served.go_on.set()
        with process(tmp_path, "--hub", "true", HF_ENDPOINT=served.address) as (_, url), Client(url) as client:
            assert leftovers(tmp_path) == []
            assert [each.path for each in client.checkpoints.list().checkpoints] == ["tiny"]  # it ships
            assert client.checkpoints.fetch("org/net").layers == 1
