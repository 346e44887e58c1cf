"""The built-in page: it is served whole, it asks nobody else, and it names only fields and paths that exist."""

import gzip
import json
import re
from collections import Counter
from graphlib import TopologicalSorter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel
from tools.built_page import ROOT, source_hash

import attention_service
from attention_client.recording import Recording
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.attention import Ran
from attention_contract.schemas.weights import BY_KEY, NEEDS_NEEDLE, NEEDS_PAIRS, OF_SOME_ATTENTIONS, HeadStatistics
from attention_contract.wire import SAFETENSORS
from tests.api.test_recordings import file_of

WEB = Path(attention_service.__file__).parent / "web"
SCRIPTS = sorted(WEB.glob("*.js"))
SOURCES = sorted([*(ROOT / "web/src").rglob("*.ts"), *(ROOT / "web/src").rglob("*.tsx")])
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
IMPORT = re.compile(r"""(?:from|import\()\s*[`"]\./([\w.-]+\.js)[`"]""")
NAMESPACES = re.compile(
    r"http://www\.w3\.org/(1998/Math/MathML|1999/xhtml|1999/xlink|2000/svg|2000/xmlns/|XML/1998/namespace)"
)
"""Names of XML namespaces, which nobody fetches."""
MOST_BYTES = 150 * 1024
"""Compressed bytes of the first load."""


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
    assert not re.findall(r"https?://|\burl\(|@import\b", NAMESPACES.sub("", text))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_sources_never_parse_text_as_markup_or_code(source):
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    assert not re.findall(unsafe, source.read_text(encoding="utf-8"))


def test_the_page_is_built_from_its_sources():
    assert (WEB / "sources.txt").read_text("utf-8").strip() == source_hash(), "run `make web`"


def test_the_first_load_is_small():
    first, waiting = set(), ["app.js"]
    while waiting:
        name = waiting.pop()
        first.add(name)
        found = re.findall(r"""from\s*[`"]\./([\w.-]+\.js)[`"]""", (WEB / name).read_text("utf-8"))
        waiting += [each for each in found if each not in first]
    names = [*first, "style.css", "index.html", "favicon.svg"]
    code = sum(len(gzip.compress((WEB / name).read_bytes())) for name in names)
    header = int.from_bytes((WEB / "recordings/cat.safetensors").read_bytes()[:8], "little")
    assert header < 49_152  # the page's first request for the recording
    assert code + 49_152 < MOST_BYTES


def test_the_recording_that_ships_is_of_a_trained_model_and_small():
    path = WEB / "recordings/cat.safetensors"
    recording = Recording.load(path)
    assert path.stat().st_size < 300_000
    assert recording.facts.model == "all-MiniLM-L6-v2"
    assert recording.weights(5).shape == (12, 13, 13)
    assert abs(recording.weights(5).astype(float).sum(-1) - 1).max() < 4e-3


def test_scripts_travel_compressed(http):
    answer = http.get("/web/app.js", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.text == (WEB / "app.js").read_text("utf-8")


def test_parts_of_the_recording_can_be_requested(http):
    answer = http.get("/web/recordings/cat.safetensors", headers={"Range": "bytes=0-7"})
    assert (answer.status_code, len(answer.content)) == (206, 8)


def test_the_page_forbids_the_browser_what_it_does_not_need(page):
    policy = next(value for value in page.values("content") if "default-src" in value)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag, attributes in page.elements:
        assert tag != "style"
        assert tag != "script" or attributes.get("src")
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_every_field_that_an_error_may_mark_is_one_of_the_contract():
    known = {path for operation in OPERATIONS if operation.request is not None for path in paths(operation.request)}
    marked = {re.sub(r"\.\d+", "", name) for text in sources() for name in re.findall(r'\bparam="([\w.]+)"', text)}
    assert "config.d_model" in marked
    assert marked - {"further"} <= known


def sources() -> list[str]:
    return [source.read_text(encoding="utf-8") for source in SOURCES]


def paths(model: type[BaseModel], prefix: str = "", within: frozenset[type] = frozenset()) -> set[str]:
    """The dotted paths of a model's fields, without the indices of lists. ``within``: the models around it."""
    found, within = set(), within | {model}
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        found.add(path)
        for member in kinds(field.annotation):
            if isinstance(member, type) and issubclass(member, BaseModel) and member not in within:
                found |= paths(member, f"{path}.", within)
    return found


def kinds(annotation: Any) -> list[Any]:
    """The types of an annotation: those of a union, and of what a list has."""
    parts = get_args(annotation)
    return [each for part in parts for each in kinds(part)] if parts else [annotation]


def test_every_path_that_the_page_asks_is_an_operation():
    known = {operation.path for operation in OPERATIONS}
    paths = {path for text in sources() for path in re.findall(r"[\"`](v1(?:/[^\"`?]*)?|health/[^\"`]*)[\"`]", text)}
    assert "v1/modules" in paths
    plain = {re.sub(r"\{\w+\}", "{}", path) for path in known}
    for path in paths:
        general = re.sub(r"\$\{.*?\}", "{}", path)
        questions = ("forward", "weights", "complexity", "gradients")
        names = {general, *(general.removesuffix("{}") + question for question in questions)}
        assert plain & {"/" + name for name in names}, path


def test_sources_import_in_one_direction_and_no_folder_is_crowded():
    imports: dict[Path, set[Path]] = {}
    for source in SOURCES:
        named = re.findall(r"""(?:from|import\()\s*"(\.[^"?]+)"[;)]""", source.read_text("utf-8"))
        imports[source] = {
            Path(f"{(source.parent / each).resolve()}{kind}") for each in named for kind in (".ts", ".tsx")
        }
        imports[source] &= set(SOURCES)
    assert sum(map(len, imports.values())) > 5 * len(SOURCES)
    folders: dict[Path, set[Path]] = {}
    for source, targets in imports.items():
        folders.setdefault(source.parent, set()).update({each.parent for each in targets} - {source.parent})
    for graph in (imports, folders):
        TopologicalSorter(graph).prepare()  # raises CycleError
    assert max(Counter(source.parent for source in SOURCES).values()) <= 20


def test_every_fact_that_is_shown_of_a_run_is_one_of_the_reply():
    shown = set(re.findall(r"\bran\.(\w+)", (ROOT / "web/src/parts/ui.tsx").read_text(encoding="utf-8")))
    assert shown == set(Ran.model_fields) - {"tf32"}  # a setting of a GPU's server, told by replies alone


def test_every_statistic_that_is_read_is_one_of_the_contract():
    text = (ROOT / "web/src/numbers/matrix.ts").read_text(encoding="utf-8")
    listed = re.search(r"const statisticsOf = .*?=> \[\n(.*?)\n\];", text, re.DOTALL)
    assert listed is not None
    names = re.findall(r'^  \["(\w+)"', listed[1], re.MULTILINE)
    assert "entropy" in names
    apart = {"classes", *OF_SOME_ATTENTIONS, *NEEDS_NEEDLE, *NEEDS_PAIRS, *BY_KEY}
    assert {*names} | apart == set(HeadStatistics.model_fields)


def test_what_the_page_sends_as_raw_attention_is_answered(http):
    text = (ROOT / "web/src/subjects/subject.ts").read_text(encoding="utf-8")
    tensors = {
        name: json.loads(found) for name, found in re.findall(r'\b([qkv]): "(\[\[.*?)"', text.replace("\\n", ""))
    }
    assert set(tensors) == {"q", "k", "v"}
    body = {
        "query": tensors["q"],
        "key": tensors["k"],
        "value": tensors["v"],
        "spec": {"score": {"name": "scaled_dot"}},
    }
    seen = http.post("/v1/attention/weights", json=body).json()
    made = http.post("/v1/attention/forward", json=body).json()
    assert [len(row) for row in seen["weights"]] == [3, 3]
    assert len(made["output"]) == 2


def test_the_requests_of_the_section_recordings_are_answered(http):
    http.post("/v1/recordings", content=file_of(seed=5)[1], headers={"content-type": SAFETENSORS})
    listed = http.get("/v1/recordings").json()["recordings"]
    assert {"id", "model", "text", "bytes"} <= set(listed[0])
    described = http.get(f"/v1/recordings/{listed[0]['id']}").json()
    assert {"tensors", "attentions", "tokens", "versions", "model", "text"} <= set(described)
    part = http.get(f"/v1/recordings/{listed[0]['id']}?layer=layers.0&heads=0%3A2").json()
    assert len(part["value"]) == 2
