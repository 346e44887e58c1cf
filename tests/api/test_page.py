"""The built-in page: it is served whole, it asks nobody else, and it names only fields and paths that exist."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from pydantic import BaseModel

import attention_service
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.attention import Ran, RawForwardRequest
from attention_contract.schemas.complexity import RawComplexityRequest
from attention_contract.schemas.modules import CreateModule
from attention_contract.schemas.recordings import RecordingFile
from attention_contract.wire import SAFETENSORS, to_safetensors
from tests.api.test_recordings import file_of

WEB = Path(attention_service.__file__).parent / "web"
SCRIPTS = sorted(WEB.glob("*.js"))
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
IMPORT = re.compile(r"""from "\./([\w.-]+)";""")


class Page(HTMLParser):
    """The elements of a page, as (tag, attributes)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def values(self, *names: str) -> list[str]:
        return [value for _, attributes in self.elements for name in names if (value := attributes.get(name))]


@pytest.fixture
def page() -> Page:
    return Page((WEB / "index.html").read_text(encoding="utf-8"))


def test_every_reference_resolves_on_the_same_server(http, page):
    for reference in page.values("src", "href"):
        if reference.startswith("#"):
            assert reference[1:] in page.values("id"), reference
            continue
        answer = http.get("/" + reference)
        assert answer.status_code == 200, reference
        if reference.startswith("web/"):
            assert content_type(answer) == TYPES[Path(reference).suffix], reference


def test_every_module_that_a_script_imports_is_served(http):
    waiting, seen = ["app.js"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        answer = http.get(f"/web/{name}")
        assert (answer.status_code, content_type(answer)) == (200, "text/javascript"), name
        waiting += IMPORT.findall(answer.text)
    assert seen == {script.name for script in SCRIPTS}


def content_type(answer: httpx.Response) -> str:
    kind = answer.headers["content-type"].partition(";")[0]
    return "text/javascript" if kind == "application/javascript" else kind


@pytest.mark.parametrize("path", [*SCRIPTS, WEB / "style.css", WEB / "index.html"], ids=lambda path: path.name)
def test_nothing_refers_to_another_place(path):
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"https?://|\burl\(|@import|[\"'(]//\w", text)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_never_parse_text_as_markup_or_code(script):
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    assert not re.findall(unsafe, script.read_text(encoding="utf-8"))


def test_the_page_forbids_the_browser_what_it_does_not_need(page):
    policy = next(value for value in page.values("content") if "default-src" in value)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag, attributes in page.elements:
        assert tag != "style"
        assert tag != "script" or attributes.get("src")
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    check = ["node", "--input-type=module", "--check"]
    ran = subprocess.run(check, input=script.read_bytes(), capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()


def test_every_control_has_a_label(page):
    text = (WEB / "index.html").read_text(encoding="utf-8")
    outside = re.sub(r"<label\b.*?</label>", "", text, flags=re.DOTALL)
    assert not re.findall(r"<(?:input|select|textarea)\b", outside)


def test_every_field_that_an_error_may_mark_is_one_of_the_contract(page):
    known = {path for model in (CreateModule, RawForwardRequest, RawComplexityRequest) for path in paths(model)}
    assert set(page.values("data-param")) <= known


def paths(model: type[BaseModel], prefix: str = "") -> set[str]:
    """The dotted paths of a model's fields."""
    found = set()
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        found.add(path)
        for member in get_args(field.annotation) or (field.annotation,):
            if isinstance(member, type) and issubclass(member, BaseModel):
                found |= paths(member, f"{path}.")
    return found


def test_every_path_that_the_scripts_ask_is_an_operation():
    known = {operation.path for operation in OPERATIONS}
    asked: set[str] = set()
    for script in SCRIPTS:
        asked |= set(re.findall(r"[\"`](v1(?:/[^\"`]*)?|health/[^\"`]*)[\"`]", script.read_text(encoding="utf-8")))
    assert "v1/modules" in asked
    for path in asked:
        general = re.sub(r"\$\{(?:encodeURIComponent\()?(?:[\w.]*\.)?(name|id)\)?\}", r"{\1}", path)
        for question in ("forward", "weights", "complexity"):
            assert "/" + general.replace("${question}", question) in known, path


def test_every_fact_that_is_shown_of_a_run_is_one_that_is_told():
    shown = set(re.findall(r"\bran\.(\w+)", (WEB / "results.js").read_text(encoding="utf-8")))
    assert shown == set(Ran.model_fields)


def test_what_the_page_sends_as_it_opens_is_answered(http, page):
    text = (WEB / "index.html").read_text(encoding="utf-8")
    tensors: dict[str, Any] = {
        name: json.loads(found)
        for name, found in re.findall(r'<textarea name="raw-(\w+)"[^>]*>(.*?)</textarea>', text, flags=re.DOTALL)
    }
    assert set(tensors) == {"query", "key", "value"}
    body = tensors | {"spec": {"score": {"name": "scaled_dot"}}}
    seen = http.post("/v1/attention/weights", json=body).json()
    made = http.post("/v1/attention/forward", json=body).json()
    assert [len(row) for row in seen["weights"]] == [3, 3]
    assert len(made["output"]) == 2


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_recording_that_is_dropped_is_read_head_by_head(tmp_path, dtype):
    weights = np.array([[[0.5, 0.25], [1, 0]], [[-2, 65504], [np.inf, 2**-20]]]).astype(dtype)
    facts = {
        "model": "tiny", "text": "a b", "created": "2026-01-02T03:04:05Z", "tokens": {"layers": ["a", "b"]},
        "attentions": [{"name": "layers.0", "heads": ["x", "y"]}], "layers": {"0.weights": weights},
    }  # fmt: skip
    path = tmp_path / "recording.safetensors"
    path.write_bytes(b"".join(to_safetensors(RecordingFile.model_validate(facts), "recording")))
    (tmp_path / "recording_file.mjs").write_bytes((WEB / "recording_file.js").read_bytes())
    (tmp_path / "read.mjs").write_text(
        """
        import { openFile } from "./recording_file.mjs";
        import { readFileSync } from "node:fs";
        const blob = new Blob([readFileSync("recording.safetensors")]);
        const { facts, heads, names } = await openFile(blob);
        const all = await heads("layers.0.weights", 0, 9);
        const last = await heads("layers.0.weights", 1, 2);
        const fault = await openFile(blob.slice(0, 30)).catch((error) => error.message);
        const read = { text: facts.text, names, all, last, fault };
        console.log(JSON.stringify(read, (_, x) => (x === Infinity ? "∞" : x)));
        """,
        encoding="utf-8",
    )
    command = ["node", "read.mjs"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, text=True)
    assert ran.returncode == 0, ran.stderr
    read = json.loads(ran.stdout)
    expected = [[["∞" if x == np.inf else x for x in row] for row in head] for head in weights.astype(float).tolist()]
    assert (read["text"], read["names"]) == ("a b", ["layers.0.weights"])
    assert read["all"] == expected
    assert read["last"] == expected[1:]
    assert read["fault"] == "This is not a safetensors file."


def test_the_requests_of_the_section_recordings_are_answered(http):
    http.post("/v1/recordings", content=file_of(seed=5)[1], headers={"content-type": SAFETENSORS})
    listed = http.get("/v1/recordings").json()["recordings"]
    assert {"id", "model", "text", "bytes"} <= set(listed[0])
    described = http.get(f"/v1/recordings/{listed[0]['id']}").json()
    assert {"tensors", "attentions", "tokens", "versions", "model", "text"} <= set(described)
    part = http.get(f"/v1/recordings/{listed[0]['id']}?layer=layers.0&heads=0%3A2").json()
    assert len(part["value"]) == 2
