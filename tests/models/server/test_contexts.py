"""The sources of an answer over real HTTP: given and generated answers, prices, memory, and callers who leave."""

import asyncio
import time

import httpx
import numpy as np
import pytest
from tests.api.talk import post, refuse
from tests.conftest import eventually, live_server

from attention_client import AsyncClient, Client, InvalidRequest
from attention_contract.schemas.analyses.context import EXAMPLE_CONTEXT

TEXT = "The cat sat on the mat. The dog ran to the river. A bird sang in the tree."
URL = "/v1/models/tiny/context"
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as url:
        yield url


@pytest.fixture(scope="module")
def client(server):
    with Client(server, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server, timeout=120) as made:
        yield made


def test_a_given_answer_is_ablated_as_separate_requests_are(client):
    answer = " The dog ran to the river. The bird sang."
    reply = client.models.context("tiny", TEXT, answer=answer, return_=["hidden", "removed"])
    assert ([each.text for each in reply.answer], reply.generated) == (
        ["The dog ran to the river.", "The bird sang."],
        False,
    )
    assert [each.text for each in reply.sources] == [part.strip(" ") for part in TEXT.replace(". ", ".|").split("|")]
    layers = [str(layer.layer) for layer in client.models.get("tiny").layers]
    ids = reply.labels.ids
    for index, source in enumerate(reply.sources):
        edit = {"tap": "weights", "keys": [*range(*source.tokens)], "set": 0, "renormalize": True}
        edited = client.models.forward("tiny", TEXT, answer=answer, edits={layer: [edit] for layer in layers})
        left = [each for at, each in enumerate(ids) if at not in range(*source.tokens)]
        logits = client.models.forward(
            "tiny", tokens=left, positions=[*range(len(left))], top_k=0, return_=["logits"]
        ).logits
        logs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
        for at, sentence in enumerate(reply.answer):
            tokens, moved = range(*sentence.tokens), len(range(*source.tokens))
            hidden = sum(each.logprob for each in edited.answer if each.position in tokens)
            removed = sum(logs[each - moved - 1, ids[each]] for each in tokens)
            assert reply.ablation.hidden[index, at] == pytest.approx(hidden - sentence.logprob, abs=1e-3)
            assert reply.ablation.removed[index, at] == pytest.approx(removed - sentence.logprob, abs=1e-3)


def test_an_answer_is_generated_first_as_a_completion_is(client):
    reply = client.models.context("tiny", TEXT, max_tokens=12)
    expected = client.models.generate("tiny", TEXT, max_tokens=12, temperature=0).choices[0].text
    assert (reply.answer_text, reply.generated) == (expected, True)
    assert reply.attention.shape == reply.gradient.shape == reply.ablation.hidden.shape == (3, len(reply.answer))
    assert "".join(part.text for part in reply.answer).replace(" ", "") == expected.replace(" ", "")
    again = client.models.context("tiny", TEXT, answer=expected)
    np.testing.assert_allclose(again.ablation.hidden, reply.ablation.hidden, atol=1e-3)
    stopped = client.models.context("tiny", TEXT, max_tokens=12, stop=expected[8:12], return_=["attention"])
    assert stopped.answer_text == expected[: expected.find(expected[8:12])]
    drawn = [
        client.models.context(
            "tiny", TEXT, max_tokens=9, min_tokens=6, temperature=1.0, seed=seed, return_=["attention"]
        ).answer_text
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_every_setting_of_a_draw_is_that_of_a_completion(client):
    def answer(**fields):
        fields |= {"max_tokens": 8, "temperature": 0.0}
        reply = client.models.context("tiny", TEXT, return_=["attention"], **fields)
        assert reply.answer_text == client.models.generate("tiny", TEXT, **fields).choices[0].text
        return reply.answer_text

    plain = answer()
    first, second = client.models.tokenize("tiny", TEXT, answer=plain).tokens[-8:][:2]
    changed = [answer(logit_bias={str(first): -100.0}), answer(stop_token_ids=[second])]
    assert plain not in changed
    assert answer(stop=plain[1:3], min_tokens=6).startswith(plain[: len(plain) // 2])


@pytest.mark.parametrize("fields", [{"max_tokens": 3}, {"seed": 0}, {"logit_bias": {"5": 1}}, {"temperature": 0.5}])
def test_a_setting_of_a_draw_beside_a_given_answer_is_refused(http, fields):
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "The cat."}]
    for prompt in ({"text": TEXT, "answer": " The cat."}, {"messages": messages}):
        for path in (URL, "/v1/models/tiny/complexity"):
            assert refuse(http, path, **prompt, **fields)["param"] == next(iter(fields))


def test_the_price_takes_the_same_body(http):
    for body in (EXAMPLE_CONTEXT, {"text": TEXT, "max_tokens": 8, "return": ["removed"], "encoding": "base64"}):
        price = post(http, "/v1/models/tiny/complexity", **body)
        ran = post(http, URL, **body)
        assert price["context"]["sources"] == len(ran["sources"])
        assert price["total_ms"] >= price["context"]["predicted_ms"] > 0
        if "answer" in body:
            assert ran["ran"]["peak_bytes"] == price["context"]["peak_bytes"]
    assert refuse(http, "/v1/models/tiny/complexity", text=TEXT, length=8)["param"] == "length"
    assert "context" not in post(http, "/v1/models/tiny/complexity", length=8)


def test_refusals_name_the_field(http, client):
    assert refuse(http, URL, answer="a")["param"] == "text"
    assert refuse(http, URL, text=TEXT, sources=[{"text": "a fish"}])["param"] == "sources.0.text"
    assert refuse(http, URL, text=TEXT, max_tokens=5000)["param"] == "max_tokens"
    assert refuse(http, URL, text=TEXT * 40)["param"] == "text"
    with pytest.raises(InvalidRequest) as caught:
        client.models.context("tiny", TEXT, split="messages")
    assert caught.value.param == "split"


def test_both_clients_get_the_same(server, client):
    async def ask():
        async with AsyncClient(server, timeout=120) as made:
            return await made.models.context("tiny", TEXT, answer=" The cat sat.", heads=2)

    found, expected = asyncio.run(ask()), client.models.context("tiny", TEXT, answer=" The cat sat.", heads=2)
    np.testing.assert_allclose(found.gradient, expected.gradient, atol=1e-6)
    assert [(each.layer, each.head) for each in found.heads] == [(each.layer, each.head) for each in expected.heads]
    assert [each.heads.shape for each in found.lookback] == [(4, 1)] * 4


def test_a_request_that_exceeds_the_memory_is_refused_before_it_runs(tmp_path):
    with live_server(tmp_path, memory_budget=2**28) as url, httpx.Client(base_url=url, timeout=120) as http:
        refused = refuse(http, URL, text="The cat sat. " * 100, answer=" The dog ran.", **{"return": ["gradient"]})
        assert (refused["status"], refused["code"]) == (413, "over_budget")


@pytest.mark.slow  # beside the time of the whole, which a busy machine takes for a part
def test_a_caller_who_leaves_ends_the_passes(http, server):
    body = {
        "text": "The cat sat. " * 80,
        "answer": " The dog ran." * 8,
        "return": ["gradient", "hidden", "removed"],
        "alone": True,
    }
    with httpx.Client(base_url=server, timeout=0.3) as hasty, pytest.raises(httpx.ReadTimeout):
        hasty.post(URL, json=body)
    started = time.monotonic()
    post(http, URL, **EXAMPLE_CONTEXT)
    assert time.monotonic() - started < 5
    eventually(lambda: http.get("/v1").json()["memory"]["in_flight_bytes"] == 0)


def test_the_accuracy_of_predictions_covers_models(http):
    def rows():
        found = http.get("/v1/complexity/accuracy").json()["predictions"]
        return {row["purpose"]: row["count"] for row in found if row["model"] and row["kernel"] == "tiny"}

    before, tokens = rows(), {"tokens": [5, 6, 7]}
    ran = http.post("/v1/models/tiny/forward", json=tokens).raise_for_status().json()["ran"]
    assert ran["predicted_low_ms"] < ran["predicted_ms"] < ran["predicted_high_ms"]
    http.post("/v1/models/tiny/weights", json=tokens).raise_for_status()
    http.post("/v1/models/tiny/gradients", json=tokens | {"of": {"position": -1}}).raise_for_status()
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3}
    told = http.post("/v1/completions", json=body).raise_for_status().json()["ran"]
    assert told["predicted_low_ms"] < told["predicted_ms"] < told["predicted_high_ms"]
    assert told["compute_ms"] > 0
    after = rows()
    more = {purpose: count - before.get(purpose, 0) for purpose, count in after.items()}
    assert {purpose: count for purpose, count in more.items() if count} == {
        "forward": 1, "weights": 1, "gradients": 1, "generation": 1,
    }  # fmt: skip
    price = http.post("/v1/models/tiny/complexity", json={"length": 14, "new_tokens": 2}).json()
    assert price["total_low_ms"] < price["total_ms"] < price["total_high_ms"]
