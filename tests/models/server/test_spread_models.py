"""A model over two processes, beside the same model in one: every question over HTTP, many callers, and its ends."""

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
import torch
from tests.api.talk import problem
from tests.conftest import eventually, live_server

from attention_client import Client

pytestmark = [pytest.mark.filterwarnings("ignore:os.fork"), pytest.mark.long]
TEXT, TAPS = "The cat sat on the mat", ["q", "k", "v", "scores", "weights", "context", "output", "hidden", "mlp"]
EDITS = {"1": [{"tap": "weights", "heads": [3], "keys": [0], "set": 0}, {"tap": "v", "heads": [2], "scale": 0.5}]}
OF = {"position": 6, "token": " dog"}
LOOK = {
    "layers": "all", "heads": [3, 0], "statistics": ["entropy", "received", "pairs"], "top_k": 2,
    "statistic_options": {"pairs": [[6, 1], [8, 8], [8, 3]]},
}  # fmt: skip
QUESTIONS = {
    "forward": {"text": TEXT, "return": [*TAPS, "logits"], "layers": "all", "edits": EDITS},
    "weights": {"text": TEXT, "layers": "all", "statistics": ["entropy", "received"], "select": {"heads": [3, 1]}},
    "gradients": {"text": TEXT, "wrt": ["embeddings", *TAPS[:7]], "layers": "all", "of": OF, "check": True},
    "effects": {"text": TEXT, "sweep": {"tap": "context", "over": ["layers", "heads"], "set": 0}, "of": OF},
    "lens": {"text": TEXT, "of": ["hidden", "output", "heads"], "targets": [" dog"], "top_k": 2},
    "context": {"sources": [{"text": "The cat sat."}, {"text": " The dog ran."}], "answer": " The cat."},
    "similarity": {"pairs": [["The cat sat", "A dog ran"]]},
}
DEVICES = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
NEAR = 2e-5  # of float32: sums of two parts


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """A server with ``tiny`` in one process, and over two as ``two``."""
    root, device = tmp_path_factory.mktemp("models"), "cuda" if "cuda:0" in DEVICES else "cpu"
    with live_server(root, device=device, stuck_seconds=5) as url, httpx.Client(base_url=url, timeout=120) as client:
        loaded = client.post("/v1/models", json={"checkpoint": "tiny", "name": "two", "devices": 2})
        assert loaded.status_code == 201, loaded.text
        assert loaded.json()["devices"] == DEVICES
        yield client


def answer(http, model, path, body):
    reply = http.post(path.format(model=model), json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def near(found, expected, where="reply"):
    """The same fields, texts and choices, and numbers within a bound."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected.keys() - {"ran", "id", "created", "model", "system_fingerprint"}:
            near(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            near(one, other, f"{where}.{at}")
    elif isinstance(expected, float):
        np.testing.assert_allclose(found, expected, rtol=NEAR, atol=NEAR, err_msg=where)
    else:
        assert found == expected, where


def processes():
    """The process of the first device, and that of the other."""
    (first,) = [each for each in psutil.Process().children() if "--spread" in each.cmdline()]
    (other,) = first.children()
    return first, other


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_model_over_two_devices_answers_as_on_one(http, question):
    path, body = f"/v1/models/{{model}}/{question}", QUESTIONS[question]
    near(answer(http, "two", path, body), answer(http, "tiny", path, body))


@pytest.mark.parametrize(
    "more",
    [{"attention": LOOK | {"edits": EDITS}}, {"attention": LOOK}, {"temperature": 1, "seed": 5, "n": 3, "logprobs": 2}],
    ids=["edited", "seen", "drawn"],
)
def test_texts_are_generated_as_on_one_device(http, more):
    found, expected = (
        answer(
            http, model, "/v1/completions", {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "model": model} | more
        )
        for model in ("two", "tiny")
    )
    near(found, expected)


def test_many_callers_share_passes_and_get_the_texts_that_they_get_alone(http):
    bodies = [
        {"model": "two", "prompt": TEXT[: 8 + at], "max_tokens": 12, "temperature": 0}
        | ({"attention": LOOK | ({"edits": EDITS} if at % 4 == 0 else {})} if at % 2 == 0 else {})
        for at in range(6)
    ]
    with ThreadPoolExecutor(len(bodies)) as threads:
        together = [*threads.map(lambda body: answer(http, "two", "/v1/completions", body), bodies)]
    assert max(each["ran"]["joined"] for each in together) > 1
    for found, body in zip(together, bodies, strict=True):
        near(found["choices"], answer(http, "two", "/v1/completions", body | {"alone": True})["choices"])


def test_the_same_bits_come_every_time_alone(http):
    body = QUESTIONS["forward"] | {"alone": True}
    first, second = (answer(http, "two", "/v1/models/{model}/forward", body) for _ in range(2))
    assert first["layers"] == second["layers"]
    assert first["logits"] == second["logits"]


def test_bad_input_harms_nobody(http):
    for body, param in (
        ({"text": TEXT, "return": ["nothing"]}, "return"),
        ({"text": TEXT, "edits": {"9": []}}, "edits"),
    ):
        assert param in problem(http.post("/v1/models/two/forward", json=body))["param"]
    near(*(answer(http, model, "/v1/models/{model}/forward", QUESTIONS["forward"]) for model in ("two", "tiny")))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"devices": 3}, "its 4 heads do not divide by 3 devices"),
        ({"devices": [DEVICES[0], "cuda:999"]}, "got cuda:999"),
        ({"devices": 2, "device_map": "auto"}, "expected no device_map"),
        ({"devices": 0}, "greater than or equal to 1"),
        ({"devices": []}, "at least 1"),
    ],
)
def test_devices_that_a_model_cannot_have_are_refused_before_a_process_starts(http, body, said):
    refused = problem(http.post("/v1/models", json={"checkpoint": "tiny", "name": "other"} | body))
    assert refused["param"].startswith("devices")
    assert said in refused["detail"]


def test_other_devices_under_a_name_that_is_taken_are_refused(http):
    refused = problem(http.post("/v1/models", json={"checkpoint": "tiny", "name": "two", "devices": 1}))
    assert (refused["code"], ", ".join(DEVICES) in refused["detail"]) == ("model_exists", True)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_device_whose_process_ends_or_stands_still_ends_the_model_and_the_next_request_loads_it(http, sent):
    def ask(_):
        return http.post("/v1/completions", json={"model": "two", "prompt": TEXT, "max_tokens": 40}).status_code

    def at_work():
        return http.get("/v1/models/two").json()["running"] > 0

    assert ask(0) == 200
    first, other = processes()
    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(ask, at) for at in range(8)]
        eventually(at_work)
        other.send_signal(sent)
        assert {each.result() for each in asking} <= {200, 503}
    eventually(lambda: not first.is_running() and not other.is_running())
    near(*(answer(http, model, "/v1/models/{model}/weights", QUESTIONS["weights"]) for model in ("two", "tiny")))


def test_callers_who_leave_in_the_middle_hold_up_nobody(http):
    def leave(at):
        try:
            http.post("/v1/completions", json={"model": "two", "prompt": TEXT, "max_tokens": 200}, timeout=0.02 * at)
        except httpx.TimeoutException:
            return True
        return False

    with ThreadPoolExecutor(8) as threads:
        assert any(threads.map(leave, range(1, 17)))
    near(*(answer(http, model, "/v1/models/{model}/weights", QUESTIONS["weights"]) for model in ("two", "tiny")))


def test_the_client_loads_a_model_over_devices(http):
    with Client(str(http.base_url)) as client:
        assert client.models.load("tiny", name="two", devices=DEVICES).devices == DEVICES
        assert client.models.get("tiny").devices == []


def test_vectors_probes_and_recordings_of_a_model_over_two_devices_are_those_on_one(http):
    words = "cat", "dog", "frog", "horse", "bird", "fish", "king", "queen", "boy", "girl"
    texts, names = [f"The {word} sat." for word in words], ("two", "tiny")
    with Client(str(http.base_url), timeout=120) as client:
        vectors = [client.vectors.fit(name, positive=texts[::2], negative=texts[1::2]) for name in names]
        near(*([layer.norm for layer in vector.layers] for vector in vectors))
        of, labels = {"point": "hidden", "layer": "all"}, [0, 1] * 5
        probes = [client.models.fit_probe(name, of, texts, labels, positions=[2] * 10) for name in names]
        for number in ("2", "3"):
            near(*(client.models.probe(probe.id).weights[number].tolist() for probe in probes))
        kept = [client.models.forward(name, text=TEXT, return_=["logits"], keep=True) for name in names]
        assert all(reply.recording for reply in kept)
        near(*(reply.logits.tolist() for reply in kept))
