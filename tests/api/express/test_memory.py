"""What express remembers, for how long, and what is seen of it."""

import gc
import re
import weakref

import numpy as np

from attention_service.api import express
from attention_service.api.express import Asked
from attention_service.modules.resident import Module
from tests.api.express.talk import ORDINARY, ask, body_of, introduce, output_of, same, soon, told
from tests.api.talk import post, problem


def test_the_version_that_a_body_names_is_held_to(http, taken, rng):
    x = rng.standard_normal((1, 3, 8)).astype(np.float32)
    version = http.get("/v1/modules/plain").json()["version"]
    taken.clear()
    assert [ask(http, "plain", body_of(x, {"version": version})).status_code for _ in range(3)] == [200] * 3
    assert [problem(ask(http, "plain", body_of(x, {"version": "other"})))["status"] for _ in range(2)] == [409, 409]
    assert taken == [False, True, True, False, False]


def test_a_module_that_is_another_now_is_found_anew(http, taken, rng):
    body = body_of(rng.standard_normal((1, 3, 8)).astype(np.float32))
    config = {"d_model": 8, "num_heads": 2, "bias": False}

    def make(seed):
        return post(http, "/v1/modules", name="changing", config=config, seed=seed)["version"]

    first = make(1)
    before = [ask(http, "changing", body) for _ in range(2)][1]
    parameters = {f"{role}_proj.weight": np.eye(8).tolist() for role in "qkvo"}
    assert http.put("/v1/modules/changing/parameters", json={"parameters": parameters}).status_code == 200
    taken.clear()
    after = [ask(http, "changing", body) for _ in range(3)]
    same(after[2], ask(http, "changing", body, **ORDINARY))
    assert taken == [False, False, True, False]
    assert told(after[0])[2]["ran"]["version"] == told(after[2])[2]["ran"]["version"] != first
    assert not np.allclose(output_of(after[0]), output_of(before))
    assert http.delete("/v1/modules/changing").status_code == 204
    assert [problem(ask(http, "changing", body))["code"] for _ in range(2)] == ["module_not_found"] * 2
    assert make(2) != first
    other = [ask(http, "changing", body) for _ in range(3)]
    assert not np.allclose(output_of(other[2]), output_of(before))
    http.delete("/v1/modules/changing")
    make(1)
    for _ in range(3):
        same(ask(http, "changing", body), before)
    assert taken[-1]
    http.delete("/v1/modules/changing")


def test_nothing_of_a_deleted_module_or_of_a_request_is_kept(http, taken, rng):
    body = body_of(rng.standard_normal((1, 3, 8)).astype(np.float32))
    post(http, "/v1/modules", name="brief", config={"d_model": 8, "num_heads": 2}, seed=3)
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            ask(http, "brief", body)
        assert sum(taken) >= 19
        (module,) = [weakref.ref(x) for x in gc.get_objects() if isinstance(x, Module) and x.name == "brief"]
        assert sum(isinstance(x, Asked) for x in gc.get_objects()) <= 1
        http.delete("/v1/modules/brief")
        assert soon(lambda: module() is None)
    finally:
        gc.enable()


def test_little_is_remembered_of_what_is_asked(served, url, http, monkeypatch, rng):
    monkeypatch.setattr(express, "MOST", 8)
    x = rng.standard_normal((1, 30, 8)).astype(np.float32)
    for length in range(1, 31):
        for accept in ("*/*", "application/json", "*/*;" + "x" * 5000):
            for _ in range(2):
                ask(http, "plain", body_of(x[:, :length]), accept=accept, cookie="secret")
        ask(http, f"no-{length}", body_of(x), cookie="secret")
    remembered = served[1]
    for each in (remembered._known, remembered._vain):
        assert 0 < len(each) <= 8
        for key in each:
            assert len(repr(key)) < 6000
            assert "secret" not in repr(key)


def test_each_request_is_counted_and_logged_once(http, taken, rng, capsys):
    bodies = [body_of(rng.standard_normal((1, 3, 8)).astype(np.float32)) for _ in range(10)]

    def counted():
        text = http.get("/metrics").text
        return [
            float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])
            for name in (
                'attention_requests_total{operation="forward",status="200"}',
                'attention_request_seconds_count{operation="forward"}',
                'attention_request_seconds_bucket{le="+Inf",operation="forward"}',
            )
            for name in [re.escape(name)]
        ]

    introduce(http, "plain", bodies[0])
    taken.clear()
    before = counted()
    capsys.readouterr()
    ids = [ask(http, "plain", body).headers["x-request-id"] for body in bodies]
    assert counted() == [number + 10 for number in before]
    assert taken == [True] * 10
    lines = capsys.readouterr().err.splitlines()
    for identity in ids:
        (line,) = [line for line in lines if identity in line]
        for part in ("method=POST", "operation=forward", "path=/v1/modules/plain/forward", "status=200"):
            assert part in line
