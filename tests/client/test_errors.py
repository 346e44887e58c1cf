"""Answers that are no replies."""

import httpx
import pytest

from attention_client import (
    AttentionError,
    NotFound,
    OverBudget,
    TooLarge,
    Unauthorized,
    UnexpectedReply,
)
from attention_client.connection_settings import OWN_VERSION
from attention_contract.errors import PROBLEM_MEDIA_TYPE
from attention_contract.wire import VERSION_HEADER
from tests.client.service import Played, ask


def test_a_problem_is_raised_as_the_error_that_it_was(kind):
    sent = OverBudget("too much", param="query", request_id="r-1", needed_bytes=5, budget_bytes=4)
    played = Played(
        httpx.Response(413, json=sent.to_problem(), headers={"content-type": f"{PROBLEM_MEDIA_TYPE}; charset=utf-8"})
    )
    with pytest.raises(OverBudget) as caught:
        ask(kind, played, "server_info")
    fault = caught.value
    assert (fault.detail, fault.param, fault.request_id) == ("too much", "query", "r-1")
    assert fault.facts == {"needed_bytes": 5, "budget_bytes": 4}


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (httpx.Response(504, html="<h1>Gateway Timeout</h1>"), UnexpectedReply, "answered 504 with text/html.*Gate"),
        (httpx.Response(401, text="who?"), Unauthorized, "answered 401"),
        (httpx.Response(404, html="<h1>nginx</h1>"), NotFound, "nginx"),
        (httpx.Response(413), TooLarge, "no media type"),
        (httpx.Response(307, headers={"location": "https://service.test/v1"}), UnexpectedReply, "use that as the base"),
        (httpx.Response(200, html="<h1>a login page</h1>"), UnexpectedReply, "login page"),
        (httpx.Response(200, json={"another": "service"}), UnexpectedReply, "does not read as ServerInfo"),
        (httpx.Response(200, json=[1]), UnexpectedReply, "does not read as ServerInfo"),
        (httpx.Response(200, content=b"{", headers={"content-type": "application/json"}), UnexpectedReply, "not read"),
        (httpx.Response(504, content=b"{", headers={"content-type": PROBLEM_MEDIA_TYPE}), UnexpectedReply, "504"),
    ],
    ids=lambda value: str(value.status_code) if isinstance(value, httpx.Response) else "",
)  # fmt: skip
def test_an_answer_of_somebody_else_says_so(kind, answer, error, text):
    played = Played(answer)
    with pytest.raises(error, match=text) as caught:
        ask(kind, played, "server_info")
    assert type(caught.value) is error
    assert caught.value.facts["answered"] == answer.status_code
    assert len(played.requests) == 1


def test_the_request_id_of_the_header_is_kept(kind):
    played = Played(httpx.Response(504, text="oops", headers={"x-request-id": "r-2"}))
    with pytest.raises(AttentionError) as caught:
        ask(kind, played, "server_info")
    assert caught.value.request_id == "r-2"


@pytest.mark.parametrize(("version", "message"), [("9.7.1", True), (OWN_VERSION, False)])
@pytest.mark.parametrize(
    "answer",
    [
        lambda headers: httpx.Response(200, json={"another": "field"}, headers=headers),
        lambda headers: httpx.Response(
            422,
            json={"code": "invalid_request", "detail": "no"},
            headers={**headers, "content-type": PROBLEM_MEDIA_TYPE},
        ),
    ],
)
def test_a_client_that_does_not_fit_the_server_says_so(kind, answer, version, message):
    with pytest.raises(AttentionError) as caught:
        ask(kind, Played(answer({VERSION_HEADER: version})), "server_info")
    assert ("pip install 'attention-service==9.7.1'" in caught.value.detail) is message
