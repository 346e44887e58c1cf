"""The layer over real HTTP: who gets in, with which scopes, and what belongs to whom."""

import json
import signal

import httpx
import numpy as np
import pytest
from starlette.routing import Route
from structlog.testing import capture_logs
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from attention_client import (
    Client,
    LensNotFound,
    ProbeNotFound,
    RecordingNotFound,
    SessionNotFound,
    Unauthorized,
    VectorNotFound,
)
from attention_contract.errors import StoreFull, StoreReadOnly
from attention_contract.operations import ANY_KEY, ASK, OPENAI_PATHS, OPERATIONS
from attention_contract.schemas.recordings import EXAMPLE_RECORDING
from attention_service.__main__ import serve
from attention_service.api.access import api_keys
from attention_service.api.access.api_keys import KeyRing, create_key, revoke_key
from attention_service.api.access.audit import AUDITED
from attention_service.api.access.layer import needs_keys, unsafe_start
from attention_service.api.access.scopes import OPEN_PATHS, SCOPES, require_scopes
from attention_service.settings import Settings
from tests.api.test_robustness import exchange
from tests.conftest import live_server

SCOPE_SETS = {
    "boss": ["infer", "inspect", "manage", "metrics"], "ann": ["infer"], "bob": ["infer"], "eye": ["inspect"],
    "hand": ["manage"], "meter": ["metrics"],
}  # fmt: skip
MODULE = {"d_model": 8, "num_heads": 2}
ALLOWED = "https://allowed.test"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """The URL of a server that needs keys, its folder, and the keys by name."""
    root = tmp_path_factory.mktemp("keyed")
    keys = {name: create_key(root, name, scopes) for name, scopes in SCOPE_SETS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_keys, "_LOOK_S", 0.0)
        with live_server(root, require_keys=True, allowed_origins=ALLOWED) as url:
            yield url, root, keys


@pytest.fixture(scope="module")
def web():
    """One client for every request: making one takes longer than asking."""
    with httpx.Client(timeout=30) as client:
        yield client


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc", "/web/app.js", "/metrics", "/v1", "/nowhere"])
def test_nothing_but_health_answers_without_a_key(keyed, path, web):
    url, _, keys = keyed
    for sent in (
        {},
        bearer("attn_wrong"),
        bearer("x y"),
        {"Authorization": keys["boss"]},
        {"Authorization": "Basic ???"},
    ):
        answer = web.get(url + path, headers=sent)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["code"] == "unauthorized"
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert web.get(url + path, headers=bearer(keys["boss"])).status_code == (404 if path == "/nowhere" else 200)


def test_health_answers_everybody(keyed, web):
    for path in OPEN_PATHS:
        assert web.get(keyed[0] + path, headers={"Host": "probe", "Origin": "https://elsewhere.test"}).is_success


def test_a_browser_asks_its_user_for_the_key_as_a_password(keyed, web):
    url, _, keys = keyed
    answer = web.get(url, headers={"Accept": "text/html,*/*"})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic")
    assert answer.headers["content-type"].startswith("text/html")  # what the browser shows if its user cancels
    assert "Reload the page to enter one" in answer.text
    assert answer.headers["x-request-id"]
    assert "unknown or revoked" in web.get(url, headers={"Accept": "text/html"}, auth=("anybody", "attn_wrong")).text
    assert web.get(url, auth=("anybody", keys["eye"])).status_code == 200


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_each_operation_wants_one_of_its_scopes(keyed, operation, web):
    url, _, keys = keyed
    path = operation.path.format(name="nobody", parameter="none", id="0" * 32, path="none", model="none")
    for name, scopes in SCOPE_SETS.items():
        answer = web.request(operation.method, url + path, headers=bearer(keys[name]))
        allowed = operation.path in OPEN_PATHS or bool(SCOPES[operation.name] & set(scopes))
        assert (answer.status_code != 403) is allowed
        if not allowed:
            reply = answer.json() if operation.path not in OPENAI_PATHS else answer.json()["error"]
            assert reply["needed_scopes"] == sorted(SCOPES[operation.name])
            assert operation.name in (reply.get("detail") or reply["message"])


def test_a_question_has_the_same_scopes_of_whatever_it_is_asked():
    """Of modules, raw attention, sessions and models alike; recordings are what a caller may see."""
    asked = {}
    for operation in OPERATIONS:
        if operation.method == "POST" and not operation.path.startswith("/v1/recordings/"):
            asked.setdefault(operation.path.rpartition("/")[2], {})[operation.name] = operation.scopes
    unlike = {question: each for question, each in asked.items() if len({*each.values()}) > 1}
    assert unlike == {}
    assert {question for question, each in asked.items() if ASK in each.values()} == {
        "attribution", "complexity", "context", "effects", "lens", "rollout", "similarity",
    }  # fmt: skip


def test_a_key_that_only_inspects_changes_and_stores_nothing():
    for operation in OPERATIONS:
        if "inspect" in operation.scopes:
            assert operation.method in {"GET", "POST"}, operation.name
            assert {StoreFull, StoreReadOnly}.isdisjoint(operation.errors), operation.name
            assert operation.request is None or "keep" not in operation.request.model_fields, operation.name


def test_every_operation_has_scopes_and_every_change_is_audited():
    assert all(scopes <= ANY_KEY for scopes in SCOPES.values())
    changes = {name for name, scopes in SCOPES.items() if scopes == {"manage"}}
    assert changes <= AUDITED <= set(SCOPES)


def test_a_route_without_scopes_keeps_the_server_from_starting():
    with pytest.raises(KeyError, match="surprise: the route has no scopes"):
        require_scopes([Route("/surprise", lambda request: None, name="surprise")])


@pytest.mark.slow
def test_the_api_document_names_the_scopes_of_each_operation(http):
    paths = http.get("/openapi.json").json()["paths"]
    for operation in OPERATIONS:
        stated = paths[operation.path][operation.method.lower()]["security"]
        assert {scope for each in stated for scope in each.get("key", ())} == SCOPES[operation.name]


def test_a_change_that_a_key_may_not_make_is_in_the_audit_log(keyed, web):
    with capture_logs() as entries:
        web.delete(f"{keyed[0]}/v1/modules/none", headers=bearer(keyed[2]["ann"]))
    lines = [(entry["who"], entry["what"], entry["status"]) for entry in entries if entry["event"] == "change"]
    assert lines == [("ann", "delete_module", 403)]


def test_a_revoked_key_is_refused(keyed):
    url, root, _ = keyed
    key = create_key(root, "guest", ["infer"])
    with Client(url, api_key=key) as guest:
        guest.server.info()
        revoke_key(root, "guest")
        with pytest.raises(Unauthorized, match="revoked"):
            guest.server.info()


def test_a_stream_ends_when_its_key_is_revoked(keyed):
    url, root, _ = keyed
    key = create_key(root, "visitor", ["infer"])
    with connect(f"ws{url.removeprefix('http')}/v1/sessions/stream", additional_headers=bearer(key)) as stream:
        stream.send("{}")
        assert json.loads(stream.recv(10))["status"] == 422
        revoke_key(root, "visitor")
        stream.send("{}")
        with pytest.raises(ConnectionClosed) as caught:
            stream.recv(10)
    assert caught.value.rcvd.code == 1008


def test_a_session_belongs_to_the_key_that_opened_it(keyed):
    url, _, keys = keyed
    clients = {name: Client(url, api_key=key) for name, key in keys.items()}
    boss, ann, bob = (clients[name] for name in ("boss", "ann", "bob"))
    boss.modules.create("own", MODULE, seed=0)
    session = ann.sessions.open("own").id
    with pytest.raises(SessionNotFound) as missing:
        bob.sessions.get("0" * 8)
    for use in (bob.sessions.get, bob.sessions.delete, bob.sessions.fork, bob.sessions.cache):
        with pytest.raises(SessionNotFound) as caught:
            use(session)
        assert caught.value.detail.replace(session, "0" * 8) == missing.value.detail
    with pytest.raises(SessionNotFound):
        bob.sessions.step(session, [[0.5] * 8])
    with pytest.raises(SessionNotFound):
        bob.sessions.open("own", from_={"session": session})
    with bob.sessions.stream() as stream, pytest.raises(SessionNotFound):
        stream.step(session, [[0.5] * 8])
    with ann.sessions.stream() as stream:
        assert stream.step(session, [[0.5] * 8]).length == 1
    assert [each.session for each in bob.sessions.list().sessions] == []
    assert session in [each.session for each in ann.sessions.list().sessions]
    assert boss.sessions.get(session).length == 1
    cached = [bob.sessions.open("own", share=True).id, ann.sessions.open("own", share=True).id]
    for client, each in zip((bob, ann), cached, strict=True):  # equal pasts of two keys take pages of their own
        client.sessions.step(each, [[0.5] * 8] * 64)
        assert client.sessions.get(each).shared_bytes == 0
    again = ann.sessions.open("own", share=True).id
    ann.sessions.step(again, [[0.5] * 8] * 64)
    assert ann.sessions.get(again).shared_bytes > 0
    boss.sessions.delete(session)
    with pytest.raises(SessionNotFound):  # also its end is none of his business
        bob.sessions.get(session)
    for client in clients.values():
        client.close()


def test_a_recording_belongs_to_the_key_that_stored_it(keyed, web):
    url, _, keys = keyed

    def ask(name, method="GET", path="/v1/recordings", **more):
        return web.request(method, url + path, headers=bearer(keys[name]), **more)

    mine, yours = (ask(name, "POST", json=EXAMPLE_RECORDING).json()["id"] for name in ("ann", "bob"))
    assert mine != yours
    assert ask("ann", "POST", json=EXAMPLE_RECORDING).json()["id"] == mine
    assert [each["id"] for each in ask("ann").json()["recordings"]] == [mine]
    assert {each["id"] for each in ask("boss").json()["recordings"]} == {mine, yours}
    assert ask("eye").json()["recordings"] == []
    for method in ("GET", "DELETE"):
        assert ask("bob", method, f"/v1/recordings/{mine}").status_code == 404
    for place in ("recordings", "recordings/of/ann", f"recordings/of/ann/{mine}.safetensors"):
        assert ask("bob", path=f"/v1/checkpoints/{place}").status_code == 404
    assert "ann" not in ask("bob", path="/v1/checkpoints").text
    assert ask("ann", path=f"/v1/recordings/{mine}").json()["bytes"] > 0
    with Client(url, api_key=keys["bob"]) as bob, pytest.raises(RecordingNotFound):
        bob.recordings.get(mine)
    assert ask("boss", "DELETE", f"/v1/recordings/{mine}").status_code == 204
    assert ask("ann").json()["recordings"] == []
    assert ask("bob", "DELETE", f"/v1/recordings/{yours}").status_code == 204


def test_a_lens_belongs_to_the_key_that_stored_it(keyed, web):
    url, _, keys = keyed
    identity, made = {str(layer): np.eye(64, dtype=np.float32) for layer in range(3)}, []
    for name in ("ann", "bob"):
        with Client(url, api_key=keys[name], timeout=120) as client:
            made.append(client.models.fit_lens("tiny", jacobians=identity).id)
    mine, yours = made

    def listed(name):
        return {
            each["id"] for each in web.get(f"{url}/v1/models/tiny/lenses", headers=bearer(keys[name])).json()["lenses"]
        }

    def read(name, lens):
        body = {"text": "the cat", "kind": "jacobian", "lens": lens, "layers": [0], "positions": [-1], "top_k": 1}
        return web.post(f"{url}/v1/models/tiny/lens", headers=bearer(keys[name]), json=body, timeout=120)

    def delete(name, lens):
        return web.delete(f"{url}/v1/lenses/{lens}", headers=bearer(keys[name]))

    assert mine != yours
    assert (listed("ann"), listed("bob"), listed("boss")) == ({mine}, {yours}, {mine, yours})
    assert (read("ann", mine).status_code, read("boss", mine).status_code) == (200, 200)
    for refused in (read("bob", mine), delete("bob", mine)):
        assert (refused.status_code, refused.json()["code"]) == (404, "lens_not_found")
    assert delete("eye", mine).status_code in {403, 404}
    for place in ("lenses", "lenses/of/ann", f"lenses/of/ann/{mine}.safetensors"):
        assert web.get(f"{url}/v1/checkpoints/{place}", headers=bearer(keys["bob"])).status_code == 404
    assert "ann" not in web.get(f"{url}/v1/checkpoints", headers=bearer(keys["bob"])).text
    with Client(url, api_key=keys["bob"]) as bob, pytest.raises(LensNotFound):
        bob.models.delete_lens(mine)
    assert delete("boss", mine).status_code == 204
    assert listed("ann") == set()
    assert delete("bob", yours).status_code == 204


def test_a_lens_that_is_being_fitted_belongs_to_its_key_too(keyed):
    url, _, keys = keyed
    with (
        Client(url, api_key=keys["ann"], timeout=120) as ann,
        Client(url, api_key=keys["bob"], timeout=120) as bob,
        Client(url, api_key=keys["boss"], timeout=120) as boss,
    ):
        begun = ann.models.fit_lens("tiny", ["The cat sat on the mat. " * 20] * 60, wait_s=0)
        assert begun.state == "fitting"
        assert bob.models.lenses("tiny").lenses == []
        with pytest.raises(LensNotFound):
            bob.models.delete_lens(begun.id)
        for client in (ann, boss):
            assert [(each.id, each.state) for each in client.models.lenses("tiny").lenses] == [(begun.id, "fitting")]
        ann.models.delete_lens(begun.id)
        assert ann.models.lenses("tiny").lenses == []


def test_a_probe_belongs_to_the_key_that_stored_it(keyed, web):
    url, _, keys = keyed
    of = {"point": "hidden", "layer": 0}
    with Client(url, api_key=keys["ann"], timeout=120) as ann, Client(url, api_key=keys["bob"], timeout=120) as bob:
        mine, yours = (client.models.fit_probe("tiny", of, weights=np.ones(64)).id for client in (ann, bob))
        assert mine != yours
        assert [each.id for each in ann.models.probes("tiny").probes] == [mine]
        for use in (bob.models.probe, bob.models.delete_probe):
            with pytest.raises(ProbeNotFound):
                use(mine)
        for place in ("probes", "probes/of/ann", f"probes/of/ann/{mine}.safetensors"):
            assert web.get(f"{url}/v1/checkpoints/{place}", headers=bearer(keys["bob"])).status_code == 404
        ann.models.delete_probe(mine)
        bob.models.delete_probe(yours)
        assert ann.models.probes("tiny").probes == []


def test_a_vector_belongs_to_the_key_that_stored_it(keyed, web):
    url, _, keys = keyed
    with Client(url, api_key=keys["ann"], timeout=120) as ann, Client(url, api_key=keys["bob"], timeout=120) as bob:
        mine, yours = (client.vectors.fit("tiny", directions={"1": np.ones(64)}).id for client in (ann, bob))
        assert mine != yours
        assert [each.id for each in ann.vectors.list("tiny").vectors] == [mine]
        for use in (bob.vectors.get, bob.vectors.delete, bob.vectors.export):
            with pytest.raises(VectorNotFound):
                use(mine)
        added = {"1": [{"tap": "hidden", "add": {"vector": mine}}]}
        with pytest.raises(VectorNotFound) as caught:
            bob.models.forward("tiny", "Kate", edits=added)
        assert caught.value.param == "edits.1.0.add.vector"
        assert ann.models.forward("tiny", "Kate", edits=added).predictions
        for place in ("vectors", "vectors/of/ann", f"vectors/of/ann/{mine}.safetensors"):
            assert web.get(f"{url}/v1/checkpoints/{place}", headers=bearer(keys["bob"])).status_code == 404
        ann.vectors.delete(mine)
        bob.vectors.delete(yours)
        assert ann.vectors.list("tiny").vectors == []


def test_a_stream_takes_the_key_as_a_header_or_as_a_subprotocol(keyed):
    url, _, keys = keyed
    address = f"ws{url.removeprefix('http')}/v1/sessions/stream"
    for refused, status in (({}, 401), ({"additional_headers": bearer(keys["eye"])}, 403)):
        with pytest.raises(InvalidStatus) as caught, connect(address, **refused):
            pass
        assert caught.value.response.status_code == status
        assert json.loads(caught.value.response.body)["status"] == status
    with connect(address, subprotocols=["attention.v1", f"attention.key.{keys['ann']}"]) as stream:
        assert stream.subprotocol == "attention.v1"
    with connect(address, additional_headers=bearer(keys["ann"]) | {"Origin": ALLOWED}) as stream:
        assert stream.subprotocol is None


def test_only_allowed_origins_get_the_headers_of_cors(keyed, web):
    url, _, keys = keyed
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = web.options(f"{url}/v1/modules", headers=asks | {"Origin": ALLOWED})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ALLOWED
    refused = web.options(f"{url}/v1/modules", headers=asks | {"Origin": "https://elsewhere.test"})
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    for sent, status in ((bearer(keys["eye"]), 200), ({}, 401)):  # a page can read the refusal
        answer = web.get(f"{url}/v1", headers=sent | {"Origin": ALLOWED})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ALLOWED
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"ETag", "X-Request-ID", "Inference-Header-Content-Length"} <= {*exposed}


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc", "/v1", "/nowhere", "/web/app.js", "/health/live"])
def test_every_reply_has_the_headers_of_safety(http, path):
    headers = http.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers.get("referrer-policy") == ("no-referrer" if path in {"/", "/docs", "/redoc"} else None)
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert ("'unsafe-inline'" in headers["content-security-policy"]) is (path in {"/docs", "/redoc"})


def test_pages_of_chosen_origins_alone_show_the_page_in_a_frame(tmp_path_factory, http, web):
    frame = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    assert http.get("/", headers=frame).status_code == 403
    with live_server(tmp_path_factory.mktemp("framed"), frame_origins="https://a.test, http://b.test:81") as url:
        page = web.get(url, headers=frame)
        assert page.status_code == 200
        assert "frame-ancestors https://a.test http://b.test:81;" in page.headers["content-security-policy"]
        assert "x-frame-options" not in page.headers
        for path in ("/docs", "/v1"):
            refused = web.get(f"{url}{path}", headers=frame)
            assert refused.status_code == 403
            assert refused.headers["x-frame-options"] == "DENY"
        response = web.get(f"{url}/v1", headers={"Origin": "https://a.test", "Sec-Fetch-Site": "cross-site"})
        assert response.status_code == 403


def test_no_page_of_another_site_changes_a_server_on_loopback(http):
    page = {"Origin": "https://elsewhere.test"}
    module = {"name": "from-a-page", "config": MODULE, "seed": 0}
    assert http.post("/v1/modules", json=module, headers=page).status_code == 403
    assert http.post("/v1/modules", content=json.dumps(module)).status_code == 415
    assert http.post("/v1/modules", json=module, headers={"Host": "elsewhere.test"}).status_code == 421
    assert http.post("/v1/modules", json=module, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert http.delete("/v1/modules/from-a-page", headers=page).status_code == 403
    assert http.get("/v1/modules/from-a-page").status_code == 404


def test_where_no_key_is_needed_a_key_counts_and_other_credentials_do_not(tmp_path, web):
    key = create_key(tmp_path, "reader", ["inspect"])
    with live_server(tmp_path) as url:
        assert web.get(f"{url}/metrics").status_code == 200
        assert web.get(f"{url}/metrics", headers=bearer("of-a-proxy")).status_code == 200
        assert web.get(f"{url}/metrics", headers=bearer(key)).status_code == 403


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization", "Content-Type"])
def test_a_repeated_header_is_refused(server, name):
    lines = ["GET /v1 HTTP/1.1", "Connection: close", *(["Host: localhost"] if name != "Host" else [])]
    answer = exchange(server, "\r\n".join([*lines, f"{name}: localhost", f"{name}: localhost", "", ""]).encode())
    assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "10.0.0.5"}, True),
        ({"host": "0.0.0.0", "require_keys": False}, False),
        ({"require_keys": True}, True),
        ({"trusted_proxies": "127.0.0.1"}, True),
    ],
)
def test_keys_are_needed_where_others_can_ask(tmp_path, settings, needed):
    made = Settings(_env_file=None, models_dir=tmp_path, **settings)
    assert needs_keys(made) is needed
    assert (unsafe_start(made) is not None) is needed
    create_key(tmp_path, "one", ["infer"])
    assert unsafe_start(made) is None


def test_a_server_that_others_reach_does_not_start_without_a_key(tmp_path, capsys):
    assert serve(["--host", "0.0.0.0", "--port", "0", "--models-dir", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert "attention keys create" in text
    assert "--require-keys false" in text


def test_the_first_start_makes_a_key_once_and_prints_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("attention_service.commands.DrainingServer", NoServer)
    monkeypatch.setattr("attention_service.commands.configure_logging", lambda *_: None)
    start = ["--host", "0.0.0.0", "--port", "0", "--first-key", "true", "--models-dir", str(tmp_path)]
    assert serve(start) == serve(start) == 0
    printed = capsys.readouterr().out
    key = printed.rpartition(" ")[2].strip()
    assert printed.count("attn_") == 1
    held = KeyRing(tmp_path).find(key.encode())
    assert (held.caller.name, held.scopes) == ("first", ANY_KEY)


def test_a_file_of_keys_that_cannot_be_read_keeps_the_server_from_starting(tmp_path, capsys):
    (tmp_path / "keys.json").write_text("{")
    assert serve(["--port", "0", "--models-dir", str(tmp_path)]) == 2
    assert "keys.json" in capsys.readouterr().err


class NoServer:
    started = True
    handle_exit = signal.SIG_DFL

    def __init__(self, *_, **__):
        pass

    def run(self):
        pass
