"""Replies as tables: what pyarrow reads back is what the JSON reply of the same request has."""

from io import BytesIO

import httpx
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from attention_client import Client
from attention_contract.wire import TABLES
from attention_service.api.bodies import table_replies
from tests.api.talk import problem
from tests.client.cli.command_line import invoke
from tests.conftest import live_server

PARQUET, FILE, STREAM = TABLES
TEXTS = ["one, two. one, two.", "the cat sat on the mat"]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as url:
        yield url


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=120) as http:
        yield http


def table(http, path, media_type, **body):
    answer = http.post(path, json=body, headers={"Accept": media_type})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == media_type
    assert answer.headers["vary"] == "Accept"
    return read(answer.content, media_type)


def read(content, media_type):
    if media_type == PARQUET:
        return parquet.read_table(BytesIO(content))
    return (pa.ipc.open_file if media_type == FILE else pa.ipc.open_stream)(content).read_all()


def same(column, numbers):
    np.testing.assert_allclose(np.array(column.to_pylist(), float), np.ravel(numbers), rtol=1e-6)


@pytest.mark.parametrize("media_type", TABLES)
def test_raw_attention_has_a_row_for_each_text_and_head(http, media_type):
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 8)).tolist()
    body = {"query": x, "key": x, "value": x, "statistics": ["entropy", "received"], "return_weights": False}
    rows = table(http, "/v1/attention/weights", media_type, **body)
    reply = http.post("/v1/attention/weights", json=body).json()["statistics"]
    assert rows["text"].to_pylist() == [0, 0, 0, 1, 1, 1]
    assert rows["head"].to_pylist() == [0, 1, 2] * 2
    same(rows["entropy"], reply["entropy"])
    same(rows["received"].combine_chunks().flatten(), reply["received"])


def test_a_whole_model_has_a_row_for_each_layer_text_and_head(http):
    edits = {"1": [{"tap": "context", "heads": [0], "set": 0}]}
    body = {"text": TEXTS, "statistics": ["induction", "max_weight"], "edits": edits, "compare": "unedited"}
    rows = table(http, "/v1/models/tiny/weights", PARQUET, **body)
    layers = http.post("/v1/models/tiny/weights", json=body | {"return_weights": False}).json()["layers"]
    assert rows.column_names == [
        "text", "layer", "head", "max_weight", "induction", "differences.max_weight", "differences.induction"
    ]  # fmt: skip
    assert rows["layer"].to_pylist() == [layer for layer in range(4) for _ in range(8)]
    for name in ("induction", "max_weight"):
        same(rows[name], [layer["statistics"][name] for layer in layers])
        same(rows[f"differences.{name}"], [layer["differences"]["statistics"][name] for layer in layers])


def test_generated_tokens_have_a_row_for_each_layer_and_head(http):
    attention = {"layers": [1, 3], "heads": [2, 0], "statistics": ["entropy", "sink_share"], "top_k": 1}
    body = {"model": "tiny", "prompt": "The cat sat", "max_tokens": 3, "temperature": 0, "attention": attention}
    rows = table(http, "/v1/completions", STREAM, **body)
    tokens = http.post("/v1/completions", json=body).json()["choices"][0]["attention"]
    assert rows["head"].to_pylist() == [2, 0] * 6
    assert rows["token"].to_pylist() == [token["token"] for token in tokens for _ in range(4)]
    assert rows["layer"].to_pylist() == [1, 1, 3, 3] * 3
    same(rows["entropy"], [layer["statistics"]["entropy"] for token in tokens for layer in token["layers"]])
    keys = [keys for token in tokens for layer in token["layers"] for keys in layer["top_keys"]["keys"]]
    assert rows["top_keys"].to_pylist() == keys
    chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1, "attention": {"layers": [0]}}
    assert len(table(http, "/v1/chat/completions", PARQUET, model="tiny", **chat)) == 4
    answer = {"input": "Who?", "max_output_tokens": 1, "attention": {"layers": [0], "heads": [3]}}
    assert table(http, "/v1/responses", PARQUET, model="tiny", **answer)["head"].to_pylist() == [3]


def test_a_request_for_what_has_no_column_is_refused_by_its_field(http):
    completion = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    for path, body, field in (
        ("/v1/models/tiny/weights", {"text": "a", "top_k": 2}, "top_k"),
        ("/v1/models/tiny/weights", {"text": "a", "select": {"heads": [0]}}, "select"),
        ("/v1/models/tiny/weights", {"text": "a", "statistics": []}, "statistics"),
        ("/v1/completions", completion, "attention"),
        ("/v1/completions", completion | {"stream": True, "attention": {}}, "stream"),
    ):
        answer = http.post(path, json=body, headers={"Accept": PARQUET})
        assert answer.status_code in {400, 422}
        assert field in answer.text
    answer = http.post("/v1/models/tiny/forward", json={"text": "a"}, headers={"Accept": PARQUET})
    assert problem(answer)["status"] == 406


def test_without_the_extra_the_answer_names_it(http, monkeypatch):
    monkeypatch.setattr(table_replies, "find_spec", lambda name: None)
    document = problem(http.post("/v1/models/tiny/weights", json={"text": "a"}, headers={"Accept": PARQUET}))
    assert document["status"] == 406
    assert "attention-service[tables]" in document["detail"]
    assert http.post("/v1/models/tiny/weights", json={"text": "a"}).status_code == 200


def test_replies_and_surveys_become_the_same_tables_in_python(url):
    with Client(url, timeout=120) as client:
        survey = client.models.survey("tiny", TEXTS, batch=2)
        rows = survey.to_table()
        assert rows.num_rows == 2 * 16
        for name in survey.values:
            same(rows[name], survey.values[name])
        assert rows["text"].to_pylist() == [0] * 16 + [1] * 16
        reply = client.models.weights("tiny", TEXTS[0], statistics=["entropy"], return_weights=False)
        of_first = rows.filter(pa.compute.equal(rows["text"], 0))
        np.testing.assert_allclose(reply.to_table()["entropy"].to_numpy(), of_first["entropy"].to_numpy(), rtol=1e-5)


def test_a_stream_and_a_response_become_the_same_tables_as_a_completion(url):
    asked = {"temperature": 0, "attention": {"layers": [2], "heads": [1, 0], "statistics": ["entropy"]}}
    with Client(url, timeout=120) as client:
        whole = client.models.generate("tiny", "The cat", max_tokens=3, **asked).to_table()
        pieces = [each.to_table() for each in client.models.stream("tiny", "The cat", max_tokens=3, **asked)]
        joined = pa.concat_tables(each for each in pieces if each.num_rows)
        response = client.models.respond("tiny", "Who?", max_output_tokens=2, **asked).to_table()
    assert joined.drop_columns("entropy") == whole.drop_columns("entropy")
    same(joined["entropy"], whole["entropy"].to_pylist())
    assert response["head"].to_pylist() == [1, 0] * 2


def test_the_command_writes_rows(url, tmp_path):
    texts, rows, arrow, looked = (tmp_path / name for name in ("t.txt", "rows.parquet", "tokens.arrow", "look.parquet"))
    texts.write_text("\n".join(TEXTS))
    for arguments in (
        ["heads", "tiny", str(texts), "--count", "0", "-o", str(rows)],
        ["generate", "tiny", "The cat", "--max-tokens", "2", "--statistic", "entropy", "-o", str(arrow)],
        ["look", "tiny", "the cat", "--layer", "1", "-o", str(looked)],
    ):
        result = invoke(["--url", url, *arguments])
        assert result.exit_code == 0, result.output
    assert parquet.read_table(rows).num_rows == 32
    assert parquet.read_table(looked)["layer"].to_pylist() == [1] * 4
    tokens = pa.ipc.open_file(arrow).read_all()
    assert tokens.num_rows == 2 * 16
    assert {"entropy", "top_keys"} <= {*tokens.column_names}
    assert "max_weight" not in tokens.column_names
    for wrong in (["--no-look", "-o", str(rows)], ["--statistic", "entropy"], ["-o", str(tmp_path / "x.csv")]):
        assert invoke(["--url", url, "generate", "tiny", "The cat", *wrong]).exit_code == 2
