"""Decode sessions over plain HTTP."""

import json

import numpy as np
import pytest
import safetensors.numpy

from attention_client import Client
from attention_contract.wire import SAFETENSORS
from tests.api.talk import post, problem, refuse

MODULE = "session-routes"
X = np.random.default_rng(0).standard_normal((1, 9, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def lane(http):
    """A client of a server that has a causal module of width 8 with 2 heads."""
    config = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
    post(http, "/v1/modules", name=MODULE, config=config, seed=0)
    return http


@pytest.fixture
def session(lane):
    """The path of a new session."""
    answer = lane.post(f"/v1/modules/{MODULE}/sessions", json={})
    assert answer.status_code == 201
    path = answer.headers["location"]
    assert path == f"/v1/sessions/{answer.json()['session']}"
    yield path
    lane.delete(path)


def whole(lane, count=9):
    return np.array(post(lane, f"/v1/modules/{MODULE}/forward", query=X[:, :count].tolist())["output"])


def test_steps_give_the_numbers_of_one_forward_pass(lane, session):
    outputs = [post(lane, f"{session}/step", query=X[:, :4].tolist())]
    outputs += [post(lane, f"{session}/step", query=X[:, at : at + 1].tolist(), at=at) for at in range(4, 9)]
    assert [each["length"] for each in outputs] == [4, 5, 6, 7, 8, 9]
    assert {each["session"] for each in outputs} == {session.rpartition("/")[2]}
    np.testing.assert_allclose(np.concatenate([np.array(x["output"]) for x in outputs], 1), whole(lane), atol=1e-5)


def test_a_step_that_comes_twice_is_appended_once(lane, session):
    first = post(lane, f"{session}/step", query=X[:, :2].tolist(), step="a", at=0)
    again = post(lane, f"{session}/step", query=X[:, :2].tolist(), step="a", at=0)
    assert (first["output"], again["length"]) == (again["output"], 2)
    document = refuse(lane, f"{session}/step", query=X[:, :2].tolist(), at=0)
    assert (document["code"], document["status"], document["expected"], document["actual"]) == (
        "length_mismatch",
        409,
        0,
        2,
    )


def test_steps_of_many_sessions_have_their_own_results_in_both_forms(lane, session):
    ids = [post(lane, f"/v1/modules/{MODULE}/sessions")["session"] for _ in range(3)]
    tensors = {f"steps.{at}.query": X[:, : at + 1] for at in range(3)}
    steps = [{"session": each, "return": ["output", "weights"]} for each in ids] + [
        {"session": "no-one", "query": [[1.0]]}
    ]
    body = safetensors.numpy.save(tensors, {"request": json.dumps({"steps": steps})})
    answer = lane.post("/v1/sessions/step", content=body, headers={"content-type": SAFETENSORS})
    assert answer.headers["content-type"] == SAFETENSORS
    found = safetensors.numpy.load(answer.content)
    for at in range(3):
        np.testing.assert_allclose(found[f"steps.{at}.output"], whole(lane, at + 1), atol=1e-5)
        assert found[f"steps.{at}.weights"].shape == (1, 2, at + 1, at + 1)
    size = int.from_bytes(answer.content[:8], "little")
    replies = json.loads(json.loads(answer.content[8 : 8 + size])["__metadata__"]["reply"])["steps"]
    assert [each["length"] for each in replies[:3]] == [1, 2, 3]
    assert (replies[3]["code"], replies[3]["session"], replies[3]["status"]) == ("session_not_found", "no-one", 404)
    listed = post(lane, "/v1/sessions/step", steps=[{"session": each, "query": X[0, :1].tolist()} for each in ids])
    assert [each["length"] for each in listed["steps"]] == [2, 3, 4]


def test_a_fork_has_a_place_of_its_own(lane, session):
    post(lane, f"{session}/step", query=X[:, :5].tolist())
    answer = lane.post(f"{session}/fork", json={"length": 3})
    fork = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, f"/v1/sessions/{fork['session']}")
    assert (fork["length"], fork["parent"]) == (3, session.rpartition("/")[2])
    step = post(lane, f"/v1/sessions/{fork['session']}/step", query=X[:, 3:9].tolist())
    np.testing.assert_allclose(step["output"], whole(lane)[:, 3:], atol=1e-5)
    assert lane.get(session).json()["length"] == 5
    parents = {each["session"]: each.get("parent") for each in lane.get("/v1/sessions").json()["sessions"]}
    assert parents[fork["session"]] == fork["parent"]


def test_what_is_cached_can_be_read_changed_and_inspected(lane, session):
    post(lane, f"{session}/step", query=X[:, :5].tolist())
    assert post(lane, f"{session}/truncate", length=4)["length"] == 4
    found = post(lane, f"{session}/weights", query=X[:, :1].tolist(), top_k=2)
    assert np.shape(found["top"]["keys"]) == (1, 2, 1, 2)
    through = post(lane, f"{session}/gradients", query=X[:, :1].tolist(), wrt=["query", "past_key"])
    assert np.shape(through["gradients"]["past_key"]) == (1, 2, 4, 4)
    cache = lane.get(f"{session}/cache", headers={"accept": SAFETENSORS})
    held = safetensors.numpy.load(cache.content)
    assert held["past_key"].shape == held["past_value"].shape == (1, 2, 4, 4)
    assert held["past_key"].dtype == np.float32
    np.testing.assert_array_equal(np.float32(lane.get(f"{session}/cache").json()["past_key"]), held["past_key"])
    body = safetensors.numpy.save({name: np.ascontiguousarray(x[:, :, :3]) for name, x in held.items()})
    headers = {"content-type": SAFETENSORS, "accept": "application/json"}
    answer = lane.put(f"{session}/cache", content=body, headers=headers)
    assert answer.json()["length"] == 3
    assert post(lane, f"{session}/reorder", rows=[0, 0])["sequences"] == 2


def test_what_is_gone_says_why_and_what_never_was_is_not_found(lane, session):
    ended = lane.delete(session)
    assert (ended.status_code, ended.content) == (204, b"")
    for method, path in (("GET", session), ("DELETE", session), ("GET", f"{session}/cache")):
        document = problem(lane.request(method, path))
        assert (document["status"], document["code"], document["reason"]) == (410, "session_gone", "deleted")
    assert refuse(lane, f"{session}/step", query=[[0.0] * 8])["reason"] == "deleted"
    assert problem(lane.get("/v1/sessions/nobody"))["code"] == "session_not_found"
    assert refuse(lane, "/v1/modules/nobody/sessions")["code"] == "module_not_found"
    pinned = lane.post(f"/v1/modules/{MODULE}/sessions", json={}, headers={"if-match": '"other"'})
    assert problem(pinned)["code"] == "version_mismatch"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": [[0.0] * 8], "past_key": [[[0.0] * 4]]}, "past_key"),
        ({"query": [[0.0] * 8], "offsets": 1}, "offsets"),
        ({"query": [[0.0] * 7]}, "query"),
        ({"query": [[0.0] * 8], "mask": [[True] * 3]}, "mask"),
        ({"query": [[0.0] * 8], "at": "no"}, "at"),
        ({"query": [[0.0] * 8], "step": ""}, "step"),
    ],
)
def test_a_refused_step_names_its_fault_and_appends_nothing(lane, session, body, param):
    document = refuse(lane, f"{session}/step", **body)
    assert (document["status"], document["param"]) == (422, param)
    assert lane.get(session).json()["length"] == 0


def test_sessions_are_listed_page_by_page(lane):
    before = lane.get("/v1/sessions?limit=1").json()["total"]
    ids = [lane.post(f"/v1/modules/{MODULE}/sessions", json={}).json()["session"] for _ in range(101)]
    found, cursor = [], ""
    while cursor is not None:
        page = lane.get(f"/v1/sessions?limit=40{cursor and '&cursor='}{cursor}").json()
        assert len(page["sessions"]) <= 40
        assert page["total"] == before + 101
        found += [each["session"] for each in page["sessions"]]
        cursor = page.get("next")
    assert (found[before:], len(lane.get("/v1/sessions").json()["sessions"])) == (ids, 100)
    with Client(str(lane.base_url)) as client:
        assert [each.session for each in client.sessions.list().sessions] == found
        assert [each.session for each in client.sessions.list(limit=2).sessions] == found[:2]
    for ident in ids:
        lane.delete(f"/v1/sessions/{ident}")


@pytest.mark.parametrize(("query", "param"), [("limit=0", "limit"), ("limit=251", "limit"), ("cursor=x", "cursor")])
def test_a_page_that_cannot_be_is_refused(lane, query, param):
    answer = lane.get(f"/v1/sessions?{query}")
    assert (answer.status_code, answer.json()["param"]) == (422, param)


@pytest.mark.long
def test_no_operation_without_a_body_documents_one(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert [path for path, of in paths.items() if "requestBody" in of.get("get", {})] == []
    assert {each["name"] for each in paths["/v1/sessions"]["get"]["parameters"]} >= {"limit", "cursor"}
