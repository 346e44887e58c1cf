"""The comparison over HTTP at its smallest: that it measures, and that it notices wrong answers."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.processes import ROOT, ServerError, cores_for, surroundings
from benchmarks.servers.attention import Attention
from benchmarks.workloads import WORKLOADS, Workload

from benchmarks import contestants, forms, load, rounds, serving

TINY = Workload("tiny", 2, 5, 8, 2, seconds=0.2)


@pytest.mark.parametrize("workload", [TINY, WORKLOADS["W1"], WORKLOADS["W2"]], ids=lambda workload: workload.name)
def test_the_answer_is_that_of_torch(workload):
    weights = {name: torch.from_numpy(value) for name, value in workload.weights().items()}
    module = torch.nn.MultiheadAttention(workload.width, workload.heads, batch_first=True)
    module.load_state_dict(weights)
    query = torch.from_numpy(workload.query(3))
    with torch.no_grad():
        expected, _ = module(query, query, query, need_weights=False)
    np.testing.assert_allclose(workload.answer(query.numpy()), expected.numpy(), atol=1e-5)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_answers_in_one_batch_are_those_of_each(tmp_path):
    threads = torch.get_num_threads()
    attention = Attention(TINY.save(tmp_path), threads)
    bodies = [TINY.query(index).tobytes() for index in range(3)]
    for body, together in zip(bodies, attention.of_bytes(*bodies), strict=True):
        alone = np.frombuffer(attention.of_bytes(body)[0], np.float32)
        np.testing.assert_allclose(np.frombuffer(together, np.float32), alone, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["wrk", "sockets"])
def test_load_counts_what_was_answered(tmp_path, request, tool):
    if tool == "sockets":
        request.getfixturevalue("sockets")
    elif shutil.which("wrk") is None:
        pytest.skip("wrk is not installed")
    _, cores = cores_for(1)
    requests = [forms.Request("", {"X-Test": "a b"}, b"1" * size) for size in (4, 0, 7)]
    with contestants.serving(contestants.BARE, TINY, tmp_path) as process:
        url = process.url
        found = load.send(f"{url}/echo", requests, 2, 1, cores, tmp_path)
        broken = load.send(f"{url}/nowhere", requests[:1], 1, 0.5, cores, tmp_path)
        assert process.peak_bytes() > 10 * 2**20
    assert found.failed == 0
    assert found.requests > 20
    assert found.rate == found.requests / found.seconds
    assert 0 < found.p50_ms <= found.p99_ms < 1000
    assert broken.failed == broken.requests > 0
    assert broken.rate == 0


@pytest.mark.slow
def test_every_server_is_compared_and_the_page_written(tmp_path, sockets):
    found = rounds.compare(TINY, contestants.entries(TINY.name), (2,), 2, TINY.seconds, tmp_path)
    assert found.faults == {}
    assert all(len(cell.loads) == 2 and min(cell.rates) > 0 for cell in found.cells)
    page = "\n".join(serving.section(found))
    for entry in contestants.entries(TINY.name):
        assert entry.name in page
    own = found.cell(contestants.UNBATCHED, "raw", 2)
    assert own.ratio(own) == 1


@pytest.mark.slow
def test_a_wrong_answer_is_noticed(tmp_path):
    entry = contestants.entries(TINY.name)[0]
    other = replace(entry, form=contestants.forms.raw("/echo"))
    with contestants.serving(entry.server, TINY, tmp_path) as process:
        url = process.url
        rounds.verify(entry, url, TINY)
        with pytest.raises(ServerError, match="wrong"):
            rounds.verify(other, url, TINY)


@pytest.mark.slow
def test_a_server_that_fails_is_reported_and_the_others_go_on(tmp_path, sockets):
    def fail(setup):
        return ["sh", "-c", "echo no such luck; exit 3"]

    peer = contestants.Server("broken", fail, "/", peer=True)
    first = contestants.entries(TINY.name)[0]
    found = rounds.compare(TINY, [first, replace(first, name="broken", server=peer)], (1,), 2, 0.2, tmp_path)
    assert found.faults == {"broken": "ended with status 3: no such luck"}
    assert len(found.cell(first.name, "raw", 1).loads) == 2
    assert "broken could not be measured: ended with status 3: no such luck" in "\n".join(serving.section(found))


def test_servers_run_with_their_defaults(monkeypatch):
    monkeypatch.setenv("ATTENTION_MAX_QUEUE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    facts = surroundings()
    assert not {name for name in facts if name.startswith(("ATTENTION_", "OMP_"))}
    assert facts["PYTHONPATH"] == f"{ROOT}{os.pathsep}elsewhere"
