"""A wrong value in any field of any request to a model is refused by its name, and harms nobody.

The places are those of the contract's schemas, so that a new field is tried from the day it is there.
"""

import threading
from contextlib import contextmanager
from itertools import islice

import httpx
import pytest
from tests.conftest import eventually, live_server
from tests.models.server.bad_requests import bad_requests
from tests.models.server.request_seeds import seeds, write_models

from attention_contract.operations import OPERATIONS
from attention_contract.schemas.openai import OpenAIRequest

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
OF_MODELS = {
    operation.name: operation
    for operation in OPERATIONS
    if operation.method == "POST" and ("{model}" in operation.path or issubclass(operation.request, OpenAIRequest))
}
STORES = "vectors", "probes", "lenses"
STEP = 293
"""Of so many wrong requests to ``tiny``, ``make test`` sends one."""
PROMPTS = {"text", "text_pair", "tokens", "messages", "answer", "prompt", "input", "instructions", "images", "audio"}
"""Fields on whose tokens others depend, which are named if they do not go with another prompt."""
OF_SIZE = {"body_too_large", "over_budget", "not_finite"}
"""Codes of refusals that name no field, but bytes, or a layer."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def http(root):
    with live_server(root, memory_budget="8GB") as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def sown(http):
    return [*seeds(http)]


@pytest.fixture(scope="module")
def others(root):
    """Models besides ``tiny``."""
    write_models(root)


def asked(http, seed, body):
    operation = OF_MODELS[seed.operation]
    return http.post(operation.path.replace("{model}", seed.model), json=body)


def request_of(seed):
    return seed.body if "{model}" in OF_MODELS[seed.operation].path else {"model": seed.model} | seed.body


@contextmanager
def beside_another_caller(http):
    """Run a block beside a caller who asks the same all the time, and gets the same numbers of one process."""
    ended, answers = threading.Event(), []

    def ask():
        reply = http.post("/v1/models/tiny/forward", json={"text": "Kate met Tom", "alone": True}).json()
        answers.append((reply["predictions"], reply["ran"]["load_ms"]))

    def go_on():
        while not ended.wait(0.2):
            ask()

    ask()
    caller = threading.Thread(target=go_on)
    caller.start()
    try:
        yield
    finally:
        ended.set()
        caller.join()
    ask()
    first, *others = answers
    assert all(predictions == first[0] and not load_ms for predictions, load_ms in others)


def stored(http):
    return {store: http.get(f"/v1/models/tiny/{store}").json()["bytes"] for store in STORES}


def remove(http, seed, answer):
    """Remove what an answer says that it stored."""
    if answer.status_code == 201:
        store = OF_MODELS[seed.operation].path.rpartition("/")[2]
        http.delete(f"/v1/{store}/{answer.json()['id']}").raise_for_status()


def fault_of(bad, answer):
    """The fault of the answer to a wrong request, in words; None for a good answer."""
    if answer.status_code < 300:
        return None
    problem = answer.json().get("error") or answer.json()
    said, param = problem.get("detail") or problem["message"], problem.get("param") or ""
    if not 400 <= answer.status_code < 500 or "was ended" in said:
        return f"status {answer.status_code}"
    if problem["code"] in OF_SIZE:
        return None
    path, field = ".".join(map(str, bad.place)), str(bad.place[0])
    named = bool(param) and (param.startswith(path) or path.startswith(param))
    beside = any(part in said for part in bad.place if isinstance(part, str))  # of two that do not go together
    by_prompt = field in PROMPTS and param.partition(".")[0] in bad.body
    return None if param and (named or beside or by_prompt) else "it does not name the field"


def test_every_operation_of_models_has_a_seed(sown):
    assert {seed.operation for seed in sown} == OF_MODELS.keys()


def walk(http, operation, chosen, step):
    """Send one of so many wrong requests of each seed, beside another caller; nothing is left of them."""
    before, faults = stored(http), []
    with beside_another_caller(http):
        for number, seed in enumerate(chosen):
            whole = request_of(seed)
            answer = asked(http, seed, whole)
            assert answer.status_code < 300, (seed, answer.text)
            remove(http, seed, answer)
            for bad in islice(bad_requests(OF_MODELS[operation].request, whole), 13 * number % step, None, step):
                answer = asked(http, seed, bad.body)
                if fault := fault_of(bad, answer):
                    faults.append(f"{seed.model} {bad}: {fault}: {answer.text[:300]}")
                remove(http, seed, answer)
    assert not faults, "\n".join(faults)
    assert stored(http) == before
    assert eventually(lambda: not http.get("/v1").json()["memory"]["in_flight_bytes"])


@pytest.mark.parametrize("operation", OF_MODELS)
def test_a_wrong_value_is_refused_by_name_and_harms_nobody(http, sown, operation):
    walk(http, operation, [seed for seed in sown if (seed.model, seed.operation) == ("tiny", operation)], STEP)


@pytest.mark.slow
@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("operation", OF_MODELS)
def test_every_wrong_value_is_refused_by_name_and_harms_nobody(http, sown, operation):
    walk(http, operation, [seed for seed in sown if seed.operation == operation], 1)


STATES = {"of": {"point": "hidden", "layer": 1}}
HUGE_EDIT = {"2": [{"tap": "output", "value": 1e308}]}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/models/tiny/weights", {"text": "Kate met", "pool": 2**31 - 1}, None),
        ("/v1/models/tiny/forward", {"text": "Kate met", "return": ["mlp"], "keep": True}, None),
        ("/v1/models/tiny/forward", {"text": "Kate met", "edits": HUGE_EDIT}, "edits.2.0.value"),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "Kate", "max_tokens": 1, "attention": {"edits": HUGE_EDIT}},
            "attention.edits.2.0.value",
        ),
        ("/v1/models/tiny/probes", STATES | {"weights": [], "scale": []}, "weights"),
        ("/v1/models/tiny/effects", {"text": "Kate met", "from": {"text": "Kate " * 999}}, "from.text"),
    ],
)
def test_what_the_walk_found_is_answered_or_refused(http, path, fields, param):
    """A square of more keys than there are took minutes; a recording has no MLPs; names were of other fields."""
    answer = http.post(path, json=fields)
    problem = answer.json().get("error") or answer.json()
    assert (answer.status_code < 300, problem.get("param")) == (param is None, param), answer.text
