"""Every optional field of OpenAI's requests changes the answer, is refused by name, or is one that changes nothing.

The fields are read from the contract, so a new one needs a case here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pytest

from attention_contract.schemas.openai import (
    AttentionOfTokens,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    Ignored,
    OpenAIRequest,
)
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.schemas.openai_api.scoring import RerankRequest, ScoreRequest
from attention_contract.schemas.openai_api.tokenization import TokenizeRequest

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns, if another test of this process imported it
ELSEWHERE: Final = {
    "add_special_tokens": "tests/api/doors/openai/test_tokenize.py and test_named_tokens.py",
    "messages": "an input",
    "stream_options": "of a response: its one field changes nothing",
    "adapter": "tests/models/server/test_adapters.py",
    "alone": "changes bits at most",
    "ignore_eos": "tests/models/generation/test_sampling.py: this model has no token that ends a text",
    "forced_bos_token_id": "refused of a decoder, below; tests/models/generation",
    "pooling": "tests/models/answers/embeddings/test_vector_similarity.py",
    "prompt_name": "tests/models/answers/embeddings/test_vector_similarity.py",
}
"""Fields that need other models, and their tests."""
NEVER_EQUAL: Final = {"id", "created", "created_at", "ran", "completed_at"}
HOT: Final = {"temperature": 1.5, "seed": 3}


class Case(NamedTuple):
    """A value of a field, and the fields without which it has no meaning."""

    value: Any
    beside: Mapping[str, Any] = MappingProxyType({})
    refused: bool = False
    """True if the model that is asked cannot do it."""


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=False)]


def number(letter: str) -> int:
    """The id of a character among the tokens of the model that talks."""
    return ord(letter) - 33


DRAWN: Final = {
    "temperature": Case(1.5, {"seed": 1}), "seed": Case(5, HOT), "top_p": Case(0.2, HOT), "top_k": Case(2, HOT),
    "min_p": Case(0.9, HOT), "presence_penalty": Case(2.0), "frequency_penalty": Case(2.0),
    "repetition_penalty": Case(9.0), "logit_bias": Case({"7": 100}), "forced_bos_token_id": Case(3, refused=True),
    "stream": Case(True), "attention": Case({}),
}  # fmt: skip
"""Fields of every generation."""


def ends(letter: str) -> dict[str, Case]:
    """Fields that end a text, for one whose first characters are this letter among others."""
    return {"stop": Case(letter), "stop_token_ids": Case([number(letter)]), "min_tokens": Case(5, {"stop": letter})}


TEMPLATE: Final = {
    "chat_template_kwargs": Case({"mood": "x"}), "add_generation_prompt": Case(False),
    "continue_final_message": Case(True),
}  # fmt: skip


def watching(http):
    """A probe of the model that talks."""
    body = {"text": "Hi", "return": ["hidden"], "layers": [0]}
    (layer,) = http.post("/v1/models/talker/forward", json=body).json()["layers"]
    of, weights = {"point": "hidden", "layer": 0}, [1.0] * len(layer["hidden"][0])
    return [{"probe": http.post("/v1/models/talker/probes", json={"of": of, "weights": weights}).json()["id"]}]


def steering(http):
    """A vector of the model that talks."""
    body = {"text": "Hi", "return": ["hidden"], "layers": [0]}
    (layer,) = http.post("/v1/models/talker/forward", json=body).json()["layers"]
    drawn = [9.0 * (-1) ** number for number in range(len(layer["hidden"][0]))]
    return [{"vector": http.post("/v1/models/talker/vectors", json={"directions": {"0": drawn}}).json()["id"]}]


ATTENTION: Final = {
    "layers": Case([1]), "heads": Case([2]), "statistics": Case(["entropy"]),
    "statistic_options": Case({"window": 1}, {"statistics": ["locality"]}), "top_k": Case(2), "weights": Case(True),
    "edits": Case({"0": [{"tap": "context", "heads": [0], "set": 0}]}), "keep": Case(True),
    "from": Case("answer", {"edits": {"1": [{"tap": "context", "heads": [0], "add": 9.0}]}}),
    "watch": Case(watching), "steer": Case(steering),
}  # fmt: skip


class Asked(NamedTuple):
    """A kind of request."""

    path: str
    request: type[OpenAIRequest]
    sent: dict[str, Any]
    cases: dict[str, Case]


GENERATED: Final = {"model": "talker", "temperature": 0}
REQUESTS: Final = {
    "completion": Asked("completions", CompletionRequest, GENERATED | {"prompt": "Hi", "max_tokens": 10},
                        DRAWN | ends("j") | {
        "max_tokens": Case(3), "n": Case(2), "logprobs": Case(2), "echo": Case(True),
        "logprob_tokens": Case([5, "x"], {"logprobs": 0}), "logprob_token_ids": Case([5], {"logprobs": 0}),
        "best_of": Case(2, refused=True),
        "suffix": Case("x", refused=True), "stream_options": Case({"include_usage": True}, {"stream": True}),
    }),
    "chat": Asked(
        "chat/completions", ChatCompletionRequest, GENERATED | {"messages": chat("Hi"), "max_tokens": 6},
        DRAWN | TEMPLATE | ends("+") | {
            "max_tokens": Case(3), "n": Case(2), "logprobs": Case(True), "top_logprobs": Case(2, {"logprobs": True}),
            "logprob_tokens": Case([5, "x"], {"logprobs": True}), "logprob_token_ids": Case([5], {"logprobs": True}),
            "stream_options": Case({"include_usage": True}, {"stream": True}),
            "max_completion_tokens": Case(3, {"max_tokens": None, "max_completion_tokens": 6}),
        } | {name: Case({"x": 1}, refused=True) for name in ChatCompletionRequest.neutral},
    ),
    "response": Asked(
        "responses", ResponseRequest, GENERATED | {"input": "Hi", "max_output_tokens": 6},
        DRAWN | TEMPLATE | ends("+") | {
            "instructions": Case("Be kind"), "max_output_tokens": Case(3),
            "include": Case(["message.output_text.logprobs"]), "top_logprobs": Case(2),
        } | {name: Case({"x": 1}, refused=True) for name in ResponseRequest.neutral},
    ),
    "embedding": Asked("embeddings", EmbeddingRequest, {"model": "encoder", "input": "the cat"}, {
        "encoding_format": Case("base64"), "dimensions": Case(4), "normalize": Case(False),
    }),
    "ranking": Asked(
        "rerank", RerankRequest, {"model": "encoder", "query": "the cat", "documents": ["the dog", "the mat sat"]},
        {"top_n": Case(1), "return_documents": Case(False), "truncate_prompt_tokens": Case(3, refused=True),
            "use_activation": Case(False, refused=True)},
    ),
    "scoring": Asked(
        "score", ScoreRequest, {"model": "encoder", "text_1": "the cat", "text_2": ["the dog", "the mat sat"]}, {
            "text_1": Case("the mat"), "text_2": Case(["the mat", "dog"]), "queries": Case("the mat", refused=True),
            "documents": Case("dog", refused=True), "truncate_prompt_tokens": Case(3, refused=True),
            "use_activation": Case(False, refused=True),
        },
    ),
    "tokenization": Asked("tokenize", TokenizeRequest, {"model": "talker", "prompt": "Hello"}, {
        "prompt": Case("Hi"), "text_pair": Case("you"), "answer": Case("you"),
        "return_token_strs": Case(True),
    } | {name: case._replace(beside={"prompt": None, "messages": chat("Hello", "you")})
         for name, case in TEMPLATE.items()}),
}  # fmt: skip


def stable(value: Any) -> Any:
    """An answer without ids and times."""
    if isinstance(value, dict):
        return {name: stable(part) for name, part in value.items() if name not in NEVER_EQUAL}
    return [stable(part) for part in value] if isinstance(value, list) else value


def answered(http, path, body):
    """The status of a request, and its answer without what differs between two equal requests."""
    reply = http.post(f"/v1/{path}", json={name: value for name, value in body.items() if value is not None})
    if "event-stream" in reply.headers["content-type"]:
        return reply.status_code, reply.text
    return reply.status_code, stable(reply.json())


def nested(name, case):
    """The case of a field of ``attention``."""
    return Case({name: case.value} | case.beside, {"attention": dict(case.beside)})


CASES = [(kind, name, case) for kind, asked in REQUESTS.items() for name, case in asked.cases.items()]
OF_ATTENTION = [(kind, name) for kind in ("completion", "chat", "response") for name in ATTENTION]


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_optional_field_has_a_case(kind):
    asked = REQUESTS[kind]
    optional = {name for name, about in asked.request.model_fields.items() if not about.is_required()}
    ignored = {name for name, about in asked.request.model_fields.items() if about.annotation is Ignored}
    assert optional - asked.cases.keys() - ELSEWHERE.keys() <= ignored - asked.request.neutral.keys()
    assert {field.alias or name for name, field in AttentionOfTokens.model_fields.items()} == ATTENTION.keys()


@pytest.fixture(scope="module")
def plain():
    """The answers of requests without the field that is tried, which many fields share, by path and body."""
    return {}


def check(http, plain, asked, name, case):
    body = asked.sent | case.beside
    request = (asked.path, repr(body))
    status, before = plain[request] = plain.get(request) or answered(http, asked.path, body)
    assert status == 200, before
    status, after = answered(http, asked.path, body | {name: case.value})
    if case.refused:
        assert (status, after["error"]["param"]) == (422, name) or (status, after["error"]["param"]) == (400, name)
    else:
        assert status == 200, after
        assert after != before


@pytest.mark.parametrize(("kind", "name", "case"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_field_changes_the_answer_or_is_refused_by_name(http, plain, kind, name, case):
    check(http, plain, REQUESTS[kind], name, case)


@pytest.mark.parametrize(("kind", "name"), OF_ATTENTION)
def test_a_field_of_attention_changes_the_answer(http, plain, kind, name):
    case = ATTENTION[name]
    if callable(case.value):
        case = case._replace(value=case.value(http))
    check(http, plain, REQUESTS[kind], "attention", nested(name, case))


@pytest.mark.parametrize("name", ATTENTION)
def test_a_field_of_attention_acts_on_an_echoed_prompt_alone_or_is_refused_by_name(http, name):
    case = ATTENTION[name]
    value = case.value(http) if callable(case.value) else case.value
    body = REQUESTS["completion"].sent | {"max_tokens": 0, "echo": True, "logprobs": 0}
    status, before = answered(http, "completions", body)
    assert status == 200
    status, after = answered(http, "completions", body | {"attention": {name: value} | case.beside})
    if name in {"edits", "steer"}:
        assert status == 200, after
        assert after != before
    else:
        named = {f"attention.{field}" for field in (name, *case.beside)}
        assert (status, after["error"]["param"] in named) == (400, True), after


def test_a_rule_that_never_stops_is_refused_and_min_tokens_hold_a_probe_back(http):
    (watch,) = watching(http)
    body = REQUESTS["completion"].sent | {"max_tokens": 6}

    def stopping(after, **fields):
        stop = {"above": -1e9, "after": after}
        return answered(http, "completions", body | fields | {"attention": {"watch": [watch | {"stop": stop}]}})

    status, reply = stopping(6)
    assert (status, reply["error"]["param"]) == (400, "attention.watch.0.stop.after")
    for after, fields, last in ((5, {}, 5), (0, {}, 0), (0, {"min_tokens": 4}, 3), (4, {"min_tokens": 2}, 4)):
        status, reply = stopping(after, **fields)
        assert (status, reply["choices"][0]["stop_reason"]["token"]) == (200, last)
