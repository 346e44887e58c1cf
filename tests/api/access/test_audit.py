"""The audit log, TLS by file and trusted proxies, over real HTTPS."""

import ssl

import httpx
import pytest
import trustme
from structlog.testing import capture_logs

from attention_contract.schemas.recordings import EXAMPLE_RECORDING
from attention_service.api.access import api_keys
from attention_service.api.access.api_keys import create_key, revoke_key
from tests.conftest import live_server

MODULE = {"name": "m", "config": {"d_model": 8, "num_heads": 2}, "seed": 0}


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    """A client of a server with TLS behind a proxy, a key that may do everything, and the folder."""
    root, authority = tmp_path_factory.mktemp("secure"), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, private = root / "chain.pem", root / "private.pem"
    certificate.cert_chain_pems[0].write_to_path(chain)
    certificate.private_key_pem.write_to_path(private)
    key = create_key(root, "boss", ["infer", "inspect", "manage"])
    context = ssl.create_default_context()
    authority.configure_trust(context)
    settings = {"ssl_certfile": chain, "ssl_keyfile": private, "trusted_proxies": "127.0.0.1", "require_keys": False}
    with pytest.MonkeyPatch.context() as patch, live_server(root, **settings) as url:
        patch.setattr(api_keys, "_LOOK_S", 0.0)
        with httpx.Client(base_url=url, verify=context, timeout=30) as http:
            yield http, key, root


def changes(entries):
    return [entry for entry in entries if entry["event"] == "change"]


def test_every_change_leaves_one_line_with_its_caller_and_outcome(secure):
    http, key, _ = secure
    headers = {"Authorization": f"Bearer {key}", "X-Request-ID": "r1"}
    with capture_logs() as entries:
        http.post("/v1/modules", json=MODULE, headers=headers)
        http.post("/v1/modules", json=MODULE | {"seed": 1}, headers=headers)
        http.post("/v1/modules/m/forward", json={"query": [[0.5] * 8]}, headers=headers)
        http.put("/v1/modules/m/parameters", json={"parameters": {}}, headers=headers)
        http.delete("/v1/modules/m", headers=headers)
        recording = http.post("/v1/recordings", json=EXAMPLE_RECORDING, headers=headers).json()["id"]
        http.delete(f"/v1/recordings/{recording}", headers=headers)
    lines = [(entry["what"], entry["target"], entry["status"]) for entry in changes(entries)]
    assert lines == [
        ("create_module", "/v1/modules/m", 201),
        ("create_module", "/v1/modules", 409),
        ("replace_parameters", "/v1/modules/m/parameters", 422),
        ("delete_module", "/v1/modules/m", 204),
        ("create_recording", f"/v1/recordings/{recording}", 201),
        ("delete_recording", f"/v1/recordings/{recording}", 204),
    ]
    assert {(entry["who"], entry["request_id"]) for entry in changes(entries)} == {("boss", "r1")}
    assert key not in str(entries)


def test_a_trusted_proxy_names_the_caller(secure):
    with capture_logs() as entries:
        secure[0].delete("/v1/modules/none", headers={"X-Forwarded-For": "203.0.113.9"})
    assert [(entry["who"], entry["status"]) for entry in changes(entries)] == [("203.0.113.9", 404)]


def test_nobody_else_names_the_caller(http):
    with capture_logs() as entries:
        http.delete("/v1/modules/none", headers={"X-Forwarded-For": "203.0.113.9"})
    assert [entry["who"] for entry in changes(entries)] == ["127.0.0.1"]


def test_new_and_revoked_keys_leave_a_line(secure):
    http, key, root = secure
    with capture_logs() as entries:
        for change in (lambda: create_key(root, "guest", ["infer"]), lambda: revoke_key(root, "guest")):
            change()
            http.get("/v1", headers={"Authorization": f"Bearer {key}"})
    assert [(entry["added"], entry["removed"]) for entry in changes(entries)] == [(["guest"], []), ([], ["guest"])]
