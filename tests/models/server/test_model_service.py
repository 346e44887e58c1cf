"""Whole models over real HTTP, with stand-ins for the models: loading, answering, waiting, ending."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from tests.api.talk import post, problem, refuse
from tests.client.tiny_models import tokenizer
from tests.conftest import eventually, live_server
from tests.models.conftest import write_checkpoint
from tests.stand_in_gpu import stand_in_gpu

from attention_client import Client
from attention_contract.errors import Overloaded
from attention_contract.schemas.models import LoadModel
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.models.folders import model_catalogue
from attention_service.models.folders.model_catalogue import PROCESS_BYTES
from attention_service.models.server import model_queue, worker_process

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns, if another test of this process imported it
ONE, MIB = "/v1/models/one", 2**20


def ask(http, text, model="one", **more):
    return post(http, f"/v1/models/{model}/forward", text=text, **more)


def state(http, name="one"):
    return http.get(f"/v1/models/{name}").json()["state"]


def count(http, event):
    """How often a model began or ended so."""
    name = f'attention_model_events_total{{event="{event}"}}'
    return next(float(line.split()[1]) for line in http.get("/metrics").text.splitlines() if line.startswith(name))


def in_flight(http):
    return http.get("/v1").json()["memory"]["in_flight_bytes"]


def test_a_model_is_loaded_by_its_first_request_and_answers(http):
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    ids = {each["id"]: each for each in listed["data"]}
    assert {"one", "org--two", "slow", "broken"} <= ids.keys()
    assert "bare" not in ids
    assert (ids["one"]["state"], ids["one"]["architecture"]) == ("idle", "LlamaForCausalLM")
    reply = ask(http, "hello")
    assert reply["labels"]["tokens"] == ["hello"]
    assert reply["layers"][0]["q"] == [[[5.0]]]
    assert reply["ran"]["model"] == "one"
    assert reply["ran"]["load_ms"] > 0
    again = ask(http, "hello")["ran"]
    assert again["load_ms"] == 0
    assert again["architecture"] == reply["ran"]["architecture"]
    info = http.get(ONE).json()
    assert (info["state"], info["dtype"], len(info["layers"])) == ("resident", "float32", 1)
    assert in_flight(http) == 0
    assert "attention_models_resident 1.0" in http.get("/metrics").text
    assert count(http, "loads") == 1


def test_a_model_can_be_loaded_under_a_name_and_unloaded(http):
    answer = http.post("/v1/models", json={"checkpoint": "org/two", "name": "mine", "dtype": "float64"})
    assert (answer.status_code, answer.headers["location"]) == (201, "/v1/models/mine")
    assert (answer.json()["state"], answer.json()["dtype"]) == ("resident", "float64")
    assert refuse(http, "/v1/models", checkpoint="one", name="mine")["code"] == "model_exists"
    assert ask(http, "a", "mine")["ran"]["model"] == "mine"
    process = int(ask(http, "a", "mine")["ran"]["architecture"])
    assert http.delete("/v1/models/mine").status_code == 204
    assert not psutil.pid_exists(process)
    assert problem(http.get("/v1/models/mine"))["code"] == "model_not_found"
    assert problem(http.delete("/v1/models/mine"))["code"] == "model_not_found"
    assert state(http, "org--two") == "idle"


def refused_completion(http, model):
    """Return the error of OpenAI's API, whose requests may name a model by the path of its checkpoint."""
    answer = http.post("/v1/completions", json={"model": model, "prompt": "a"})
    assert answer.status_code == 409
    return answer.json()["error"]


def test_checkpoints_with_one_default_name_are_never_taken_for_each_other(stand_ins, tmp_path):
    """A path that is the name itself goes before others; of two that are not, neither has it."""
    for path in ("a--b", "a/b", "x/y--z", "x--y/z", "one"):
        write_checkpoint(tmp_path / path)
    with live_server(tmp_path) as url, httpx.Client(base_url=url, timeout=60) as client:
        listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
        shared = {"a/b", "x/y--z", "x--y/z"}
        assert {name for name, each in listed.items() if "the same default name" in each.get("refused", "")} == shared
        assert listed["a--b"]["checkpoint"] == "a--b"
        assert ask(client, "a", "a--b")["ran"]["model"] == "a--b"
        for model in ("a/b", "x--y--z", "x/y--z"):
            refusal = refused_completion(client, model)
            assert (refusal["code"], refusal["param"]) == ("model_exists", "model")
        refusal = refuse(client, "/v1/models", checkpoint="a/b")
        assert (refusal["status"], refusal["param"]) == (409, "name")
        assert post(client, "/v1/models", checkpoint="a/b", name="second")["checkpoint"] == "a/b"
        assert ask(client, "a", "second")["ran"]["model"] == "second"
        post(client, "/v1/models", checkpoint="one", name="x--y--z")
        assert client.get("/v1/models/x--y--z").json()["checkpoint"] == "one"


def test_a_path_is_never_answered_by_a_model_of_another_checkpoint(http):
    post(http, "/v1/models", checkpoint="one", name="org--two")
    refusal = refused_completion(http, "org/two")
    assert (refusal["code"], refusal["param"]) == ("model_exists", "model")
    http.delete("/v1/models/org--two")
    assert ask(http, "a", "org--two")["ran"]["model"] == "org--two"


def test_what_a_model_holds_of_a_gpu_counts_in_place_of_the_estimate(http):
    held = [http.post("/v1/models", json={"checkpoint": "one", "name": "mine"}).json()["bytes"]]
    for amount in (300, 100):
        ask(http, f"hold {amount}", "mine")
        held.append(http.get("/v1/models/mine").json()["bytes"])
    assert held == [http.get(ONE).json()["bytes"], PROCESS_BYTES + 300 * MIB, PROCESS_BYTES + 100 * MIB]
    resident = sum(model["bytes"] for model in http.get("/v1/models").json()["data"] if model["state"] == "resident")
    lines = http.get("/metrics").text.splitlines()
    assert resident == next(float(line.split()[1]) for line in lines if line.startswith("attention_model_bytes "))
    http.delete("/v1/models/mine")


async def test_what_the_server_keeps_of_a_gpu_goes_back_before_a_model_needs_it(stand_ins, repository, monkeypatch):
    with stand_in_gpu(monkeypatch) as gpu:
        engine = Engine(repository, gpu, EngineSettings(learns_times=False))
        await engine.start()
        try:
            gpu.free_bytes = lambda: 0  # the rest of the GPU is what PyTorch keeps for the server
            await engine.models.load(LoadModel(checkpoint="one"))
            assert gpu.given_back == 1
        finally:
            await engine.stop()
        assert engine.budget.in_flight == 0


def test_a_model_is_divided_by_accelerate_alone(http, monkeypatch):
    monkeypatch.setattr(model_catalogue, "find_spec", {"transformers": True}.get)
    refusal = refuse(http, "/v1/models", checkpoint="one", device_map="auto")
    assert (refusal["status"], refusal["param"]) == (422, "device_map")
    assert "attention-service[offload]" in refusal["detail"]


@pytest.mark.slow
def test_a_divided_model_gets_most_of_the_memory_unless_it_needs_less(stand_ins, tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "large", 128 * MIB)
    monkeypatch.setattr(model_catalogue, "find_spec", lambda _: True)
    need = PROCESS_BYTES + 256 * MIB
    for budget, limit in ((2 * need, None), (need, int(0.75 * need) - PROCESS_BYTES)):
        with live_server(tmp_path, memory_budget=budget) as url, httpx.Client(base_url=url, timeout=60) as client:
            reply = post(client, "/v1/models", checkpoint="large", device_map="auto")
            assert reply.get("max_length") == limit
            assert reply["bytes"] <= 0.85 * budget
            assert post(client, "/v1/models", checkpoint="large") == reply


def test_progress_shows_while_a_model_loads(http):
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(post, http, "/v1/models", checkpoint="slow")
        seen = set()
        while not loading.done():
            time.sleep(0.01)
            info = http.get("/v1/models/slow").json()
            if info["state"] == "loading":
                seen.add(info["progress"])
        assert loading.result()["state"] == "resident"
    assert len(seen) > 2


@pytest.mark.slow
def test_a_load_that_nobody_waits_for_ends_with_its_model(http):
    loads, unwanted = count(http, "loads"), {"checkpoint": "slow", "name": "unwanted"}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/models", json=unwanted, timeout=0.3)
    assert state(http, "unwanted") == "loading"
    assert http.delete("/v1/models/unwanted").status_code == 204
    assert problem(http.get("/v1/models/unwanted"))["code"] == "model_not_found"
    assert count(http, "loads") == loads
    assert in_flight(http) == 0
    assert http.post("/v1/models", json=unwanted).json()["state"] == "resident"
    http.delete("/v1/models/unwanted")


@pytest.mark.slow
def test_an_unloaded_model_ends_however_many_requests_come(http):
    """Those that come meanwhile load it anew, in a process of its own."""
    over, answered = threading.Event(), ([], [], [])

    def ask_on(by):
        while not over.is_set():
            by.append(ask(http, "sleep 0.1", "org--two")["ran"]["architecture"])

    first = ask(http, "a", "org--two")["ran"]["architecture"]
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on, by) for by in answered]
        assert eventually(lambda: all(answered))
        unloading = pool.submit(http.delete, "/v1/models/org--two")
        try:
            assert unloading.result(timeout=30).status_code == 204
            assert not psutil.pid_exists(int(first))
        finally:
            over.set()
        for each in asking:
            each.result()
    assert all(by[0] == first for by in answered)


def test_who_waits_for_a_load_is_informed_of_it_though_the_model_is_unloaded_meanwhile(http):
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(post, http, "/v1/models", checkpoint="slow", name="brief")
        while http.get("/v1/models/brief").status_code == 404:
            time.sleep(0.01)
        assert http.delete("/v1/models/brief").status_code == 204
        assert loading.result()["state"] == "resident"
    assert problem(http.get("/v1/models/brief"))["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/models/nobody/forward", {"text": "a"}, 404, "model_not_found"),
        ("/v1/models", {"checkpoint": "nobody"}, 404, "checkpoint_not_found"),
        ("/v1/models", {"checkpoint": "../one"}, 404, "checkpoint_not_found"),
        ("/v1/models", {"checkpoint": "bare"}, 422, "invalid_checkpoint"),
        ("/v1/models", {"checkpoint": "one", "device_map": "balanced"}, 422, "invalid_request"),
        ("/v1/models/broken/forward", {"text": "a"}, 500, "internal_error"),
        ("/v1/models/one/forward", {"text": "fail x"}, 500, "internal_error"),
        ("/v1/models/one/forward", {}, 422, "invalid_request"),
    ],
)
def test_faults_are_problems(http, path, body, status, code):
    refusal = refuse(http, path, **body)
    assert (refusal["status"], refusal["code"]) == (status, code), refusal
    assert in_flight(http) == 0


def test_the_log_has_the_cause_of_a_failure(http, caplog):
    refusal = refuse(http, "/v1/models/one/forward", text="fail badly")
    assert "traceback" not in refusal
    assert "in forward" in caplog.text
    assert "ZeroDivisionError: badly" in caplog.text


def test_what_a_library_prints_is_no_message(http):
    assert ask(http, "print this")["labels"]["tokens"] == ["print this"]
    assert ask(http, "again")["labels"]["tokens"] == ["again"]


def test_a_run_is_kept_as_a_recording(http):
    kept = ask(http, "keep it", keep=True)["recording"]
    assert http.get(f"/v1/recordings/{kept}").json()["text"] == "keep it"


@pytest.mark.long
@pytest.mark.usefixtures("started_as_served")
@pytest.mark.parametrize(
    "end", [pytest.param("die", id="killed"), pytest.param("lose", id="GPU lost", marks=pytest.mark.slow)]
)
def test_a_process_that_dies_fails_its_request_alone_and_comes_back(http, end):
    first, deaths = ask(http, "a")["ran"]["architecture"], count(http, "deaths")
    with ThreadPoolExecutor() as threads:
        dying = threads.submit(http.post, f"{ONE}/forward", json={"text": end})
        time.sleep(0.05)
        waiting = threads.submit(ask, http, "b")
        refusal = problem(dying.result())
        assert (refusal["status"], refusal["code"]) == (503, "model_ended")
        assert dying.result().headers["retry-after"] == "1"
        assert waiting.result()["ran"]["architecture"] != first
    assert count(http, "deaths") == deaths + 1


@pytest.mark.slow
@pytest.mark.usefixtures("started_as_served")
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_process_is_noticed_by_nobody_but_its_request_and_the_client_repeats_it(http, kills):
    """Under load of a module beside it."""
    made = {"name": "beside", "config": {"d_model": 8, "num_heads": 2}}
    post(http, "/v1/modules", **made)
    ends, faults, deaths = threading.Event(), [], count(http, "deaths")

    def beside():
        with httpx.Client(base_url=http.base_url, timeout=60) as other:
            while not ends.wait(0.02):
                answer = other.post("/v1/modules/beside/forward", json={"query": [[0.5] * 8]})
                if answer.status_code != 200:
                    faults.append(answer.text)

    with ThreadPoolExecutor() as threads, Client(str(http.base_url), timeout=60) as client:
        load = threads.submit(beside)
        for _ in range(kills):
            process = int(client.models.forward("one", "a").ran.architecture)
            running = threads.submit(client.models.forward, "one", "sleep 0.2")
            time.sleep(0.1)
            os.kill(process, signal.SIGKILL)
            assert running.result().ran.architecture != str(process)
        ends.set()
        load.result()
    assert faults == []
    assert in_flight(http) == 0
    assert count(http, "deaths") == deaths + kills


def test_work_stops_at_its_deadline_and_when_its_caller_leaves(http):
    process = ask(http, "a")["ran"]["architecture"]
    began = time.monotonic()
    late = http.post(f"{ONE}/forward", json={"text": "sleep 30"}, headers={"Prefer": "wait=0.3"})
    assert problem(late)["code"] == "deadline_exceeded"
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{ONE}/forward", json={"text": "sleep 30"}, timeout=0.3)
    assert ask(http, "b")["ran"]["architecture"] == process
    assert time.monotonic() - began < 10
    assert in_flight(http) == 0


def test_work_that_does_not_stop_ends_with_its_process(http, monkeypatch):
    monkeypatch.setattr("attention_service.models.server.worker_process.STOP_S", 0.3)
    process = ask(http, "a")["ran"]["architecture"]
    late = http.post(f"{ONE}/forward", json={"text": "stubborn 30"}, headers={"Prefer": "wait=0.3"})
    assert problem(late)["code"] == "deadline_exceeded"
    assert ask(http, "b")["ran"]["architecture"] != process
    assert in_flight(http) == 0


@pytest.mark.long
def test_two_callers_take_turns(stand_ins, repository, monkeypatch):
    """Of the requests that a process has at once, one caller has half while another one waits."""
    from attention_service.api.access.api_keys import create_key

    monkeypatch.setattr(model_queue, "RUNNING", 4)
    monkeypatch.setattr(model_queue, "OF_ONE", 2)
    keys = [create_key(repository, name, ["infer"]) for name in ("greedy", "modest")]
    order = []
    with live_server(repository, require_keys=True) as url, ThreadPoolExecutor(16) as threads:

        def send(who, text):
            key = {"Authorization": f"Bearer {keys[who]}"}
            httpx.post(f"{url}{ONE}/forward", json={"text": text}, headers=key, timeout=60).raise_for_status()
            order.append(who)

        send(0, "a")
        order.clear()
        many = [threads.submit(send, 0, "sleep 0.1") for _ in range(8)]
        time.sleep(0.3)
        few = [threads.submit(send, 1, "sleep 0.1") for _ in range(2)]
        for each in many + few:
            each.result()
    assert order.index(1) <= 7
    assert order[order.index(1) :][:3].count(1) == 2


@pytest.mark.slow
def test_a_model_that_outgrows_its_estimate_ends_alone(http, monkeypatch):
    ask(http, "a", "org--two")
    ask(http, "a")
    refusal = refuse(http, f"{ONE}/forward", text="take 600")
    assert (refusal["status"], refusal["code"]) == (413, "over_budget")
    assert refusal["needed_bytes"] > refusal["limit_bytes"]
    assert (state(http), state(http, "org--two")) == ("idle", "resident")
    assert ask(http, "b")["labels"]["tokens"] == ["b"]
    assert in_flight(http) == 0


@pytest.mark.slow
def test_files_that_a_process_maps_are_not_its_memory(http):
    """As the libraries of PyTorch's build for CUDA, on a machine without a GPU too."""
    before = ask(http, "a")["ran"]["architecture"]
    assert ask(http, "map 700")["ran"]["architecture"] == before


def test_a_request_that_does_not_fit_is_refused_before_it_runs(http):
    refusal = refuse(http, f"{ONE}/forward", text="needs 10000000")
    assert refusal["status"] in {413, 507}
    assert ask(http, "b")["labels"]["tokens"] == ["b"]


@pytest.mark.long
def test_the_least_recently_used_model_gives_way(stand_ins, repository):
    from attention_service.models.folders.model_catalogue import PROCESS_BYTES

    with live_server(repository, memory_budget=int(2.5 * PROCESS_BYTES)) as url, httpx.Client(base_url=url) as http:
        http.timeout = 60
        ask(http, "a")
        ask(http, "a", "org--two")
        ask(http, "a")
        ask(http, "a", "slow")
        assert [state(http, name) for name in ("one", "org--two", "slow")] == ["resident", "idle", "resident"]
        ask(http, f"needs {PROCESS_BYTES // 2**20}", "slow")  # a request's memory comes from idle models too
        assert [state(http, name) for name in ("one", "slow")] == ["idle", "resident"]
        assert count(http, "evictions") == 2


@pytest.mark.slow
def test_memory_of_a_model_that_answers_is_worth_a_second_try(stand_ins, repository):
    """413 says that a request never fits, and clients do not repeat it."""
    with live_server(repository, memory_budget=int(1.5 * PROCESS_BYTES)) as url, httpx.Client(base_url=url) as http:
        http.timeout = 60
        ask(http, "a")
        with ThreadPoolExecutor() as threads:
            asking = threads.submit(ask, http, "sleep 3")
            assert eventually(lambda: in_flight(http) > 0)
            answer = http.post("/v1/models/slow/forward", json={"text": "a"})
            assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
            assert "whole models that hold" in answer.json()["detail"]
            assert "answer requests: one (" in answer.json()["detail"]
            assert int(answer.headers["retry-after"]) >= 60
            with Client(url) as client, pytest.raises(Overloaded, match=r"Ask again when one of them is idle"):
                client.models.forward("slow", "a")
            assert not asking.done(), "the reason came late"
            own = refuse(http, f"{ONE}/forward", text=f"needs {PROCESS_BYTES // MIB}")  # it has to answer itself
            assert own["status"] == 413
            asking.result()
        with Client(url) as client:
            asking = client.models.forward("slow", "a")
        assert asking.ran.model == "slow"


@pytest.mark.slow
def test_an_idle_model_ends_and_comes_back(stand_ins, repository):
    with live_server(repository, model_idle_seconds=0.3) as url, httpx.Client(base_url=url, timeout=60) as http:
        first = ask(http, "a")["ran"]["architecture"]
        eventually(lambda: not psutil.pid_exists(int(first)))
        assert state(http) == "idle"
        assert ask(http, "a")["ran"]["architecture"] != first


def test_an_idle_model_is_described_by_the_files_that_its_folder_has_now(stand_ins, tmp_path, monkeypatch):
    """Also while its process ends, which takes a while on a busy machine."""
    may_end, end = threading.Event(), worker_process.WorkerProcess.end

    async def slow_end(worker):
        await asyncio.to_thread(may_end.wait, 60)
        await end(worker)

    monkeypatch.setattr(worker_process.WorkerProcess, "end", slow_end)
    write_checkpoint(tmp_path / "one")
    tokenizer().save_pretrained(tmp_path / "words")
    with live_server(tmp_path, model_idle_seconds=0.1) as url, httpx.Client(base_url=url, timeout=60) as http:
        for name in ("one", "mine"):
            http.post("/v1/models", json={"checkpoint": "one", "name": name}).raise_for_status()
        eventually(lambda: [state(http, name) for name in ("one", "mine")] == ["idle", "idle"])

        def takes():
            listed = {each["id"]: each["takes"] for each in http.get("/v1/models").json()["data"]}
            return [listed["one"], listed["mine"], http.get("/v1/models/mine").json()["takes"]]

        assert takes() == [[]] * 3
        shutil.copy(tmp_path / "words" / "tokenizer.json", tmp_path / "one")
        assert takes() == [["text"]] * 3
        may_end.set()
        assert takes() == [["text"]] * 3
        shutil.rmtree(tmp_path / "one")
        assert takes()[2] == ["text"], "what was known is told"


@pytest.mark.slow
def test_a_model_unloaded_while_its_process_ends_leaves_no_bytes_in_the_budget(stand_ins, repository, monkeypatch):
    ends, end = threading.Event(), worker_process.WorkerProcess.end

    async def slow_end(worker):
        if not ends.is_set():
            ends.set()
            await asyncio.sleep(0.2)
        await end(worker)

    monkeypatch.setattr(worker_process.WorkerProcess, "end", slow_end)
    with live_server(repository, model_idle_seconds=0.1) as url, httpx.Client(base_url=url, timeout=60) as http:
        ask(http, "a")
        assert ends.wait(timeout=30)
        assert state(http) == "idle"
        assert http.delete(ONE).status_code == 204
        assert "attention_model_bytes 0.0" in http.get("/metrics").text
        assert ask(http, "a")["ran"]["load_ms"] > 0


def test_models_are_loaded_before_any_request_if_a_setting_names_them(stand_ins, repository):
    with live_server(repository, preload="one, none, org/two") as url, httpx.Client(base_url=url, timeout=60) as http:
        eventually(lambda: [state(http, name) for name in ("one", "org--two")] == ["resident", "resident"])
        assert state(http, "slow") == "idle"


def test_processes_end_with_their_server(stand_ins, repository):
    with live_server(repository) as url, httpx.Client(base_url=url, timeout=60) as http:
        process = int(ask(http, "a")["ran"]["architecture"])
    assert not psutil.pid_exists(process)


SERVER = """
import os, subprocess, sys, time
from attention_service.models.worker_messages import pieces_of, read_message
del os.environ["ATTENTION_API_KEY"]
started = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
facts = {"folder": "one", "dtype": "float32", "device": "cpu", "free_bytes": None, "memories": []}
started.stdin.write(b"".join(pieces_of("load", facts)))
while read_message(started.stdout).kind != "loaded":
    pass
print(started.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_process_ends_with_a_server_that_is_killed(repository, stand_ins, stopped):
    """Also one that is stopped, which does not see the end of its input."""
    command = [sys.executable, "-c", SERVER, *worker_process.COMMAND]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        if stopped:
            process.suspend()
        parent.kill()
    eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_a_server_without_transformers_says_what_to_install(http, monkeypatch):
    http.delete(ONE)  # a resident model answers without
    monkeypatch.setattr("attention_service.models.folders.model_catalogue.has_transformers", lambda: False)
    for refusal in (refuse(http, f"{ONE}/forward", text="a"), refuse(http, "/v1/models", checkpoint="one")):
        assert refusal["param"] == "checkpoint"
        assert "attention-service[transformers]" in refusal["detail"]
    assert "transformers" in http.get(ONE).json()["refused"]
