"""Costs as pictures: files of the kind asked for, which show what the JSON reply has."""

import io
import json
import re
import threading
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.answers import Crossover, Picture
from attention_contract.schemas.costs.complexity import ComplexityReply
from attention_contract.schemas.costs.sweeps import Sweep
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.weights import RawWeightsRequest
from attention_contract.wire import SAFETENSORS
from attention_pictures import figures as drawing
from attention_pictures.figures import Names
from attention_pictures.figures import draw as draw_reply
from attention_pictures.picture_files import MOST_PIXELS
from attention_service.api.bodies import pictures
from tests.api.talk import problem
from tests.conftest import live_server
from tests.pictures.test_layout import faults

RAW = {"shape": {"queries": 4096}, "num_heads": 8, "head_dim": 64, "memory_bytes": 2**26}  # few: limits are found soon
WINDOW = {
    "label": "a window",
    "kernel": "blocked",
    "spec": {"masks": [{"name": "sliding_window", "left": 64, "right": 64}]},
}
SMALL = "width=320"
SVG, PNG, PDF = "image/svg+xml", "image/png", "application/pdf"


def drawn(http, media_type=SVG, path="/v1/attention/complexity", **fields):
    body = RAW | fields if "complexity" in path else fields
    answer = http.post(path, json=body, headers={"Accept": media_type})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith(media_type)
    assert answer.headers["vary"] == "Accept"
    return answer.content


def words(svg):
    return [text.text for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314 - our own


def test_an_svg_names_the_lines_the_axes_and_where_they_cross(http):
    fields = {"compare": [WINDOW], "sweep": {"values": [64, 256, 1024, 16384]}, "kernel": "fused"}
    texts = words(drawn(http, **fields))
    assert {"request", "a window", "free", "length", "bytes", "64", "16384"} <= set(texts)
    assert any("seconds" in text for text in texts)
    reply = http.post("/v1/attention/complexity", json=RAW | fields).json()
    crossings = {
        f"{found['cheaper']} from {found['at']}"
        for found in reply["crossovers"]
        if found["of"] == "time" and found.get("at", 0) >= 64
    }
    assert crossings <= set(texts)


VALUES = [64, 1024, 16384]


@pytest.fixture
def drawn_of(http):
    """A picture of so many things compared, under names, that cross one another at these lengths."""
    answer = http.post("/v1/attention/complexity", json=RAW | {"sweep": {"values": VALUES}}).json()
    reply = ComplexityReply.model_validate(answer)

    def draw(labels, lengths=()):
        compared = [reply.series[0].model_copy(update={"label": label}) for label in labels]
        crossovers = [
            Crossover(of="time", between=(labels[0], label), dimension="length", searched=(1, 2), cheaper=label, at=at)
            for label, at in zip(labels[1:], lengths, strict=False)
        ]
        doctored = reply.model_copy(update={"compared": compared, "crossovers": crossovers})
        return draw_reply(doctored, PictureOptions(), SVG, Names(sweep=Sweep(values=VALUES)), {}).data

    return draw


LONG = [f"blocked, sliding_window (left {2**size}, right {2**size}), softcap 30, alibi" for size in range(17)]


@pytest.mark.slow
def test_many_lines_leave_out_what_would_hide_them_and_say_so(drawn_of):
    texts = words(drawn_of(LONG, range(100, 8000, 500)))
    assert all(texts.count(label) == 1 for label in LONG), "one legend for both"
    (note,) = [text for text in texts if "left out" in text]
    assert "the intervals of times" in note
    assert "16 crossovers of time" in note
    assert not any(" from " in text for text in texts)
    few = words(drawn_of(LONG[:3], [100, 2000]))
    assert not any("left out" in text for text in few)
    assert len([text for text in few if text.endswith((" from 100", " from 2000"))]) == 2


@pytest.mark.slow
def test_legends_stay_within_the_picture_and_lines_can_be_distinguished(drawn_of):
    """By what is drawn: no entry over another, none beyond the edge, no two lines that look alike."""
    svg = ET.fromstring(drawn_of(LONG))  # noqa: S314 - our own
    _, _, width, height = (float(number) for number in svg.attrib["viewBox"].split())
    (legend,) = [group for group in svg.iter() if group.get("id", "").startswith("legend_")]
    texts = list(legend.iter("{http://www.w3.org/2000/svg}text"))
    places = [[float(number) for number in re.findall(r"[\d.]+", text.get("transform"))[-2:]] for text in texts]
    for text, (x, y) in zip(texts, places, strict=True):
        assert 0 < x < x + 5.4 * len(text.text) < width
        assert 0 < y < height
    rows = sorted(y for _, y in places)
    assert len(rows) == 18
    assert all(after - before > 9 for before, after in pairwise(rows))
    lines = [path.get("style") for path in legend.iter("{http://www.w3.org/2000/svg}path") if path.get("style")]
    assert len({style for style in lines if "fill: none" in style}) == 18


@pytest.mark.slow
@pytest.mark.parametrize("width", [750, *(pytest.param(each, marks=pytest.mark.slow) for each in (1004, 2008))])
def test_costs_fit_the_columns_of_a_paper(http, width):
    answer = http.post("/v1/attention/complexity", json=RAW | {"sweep": {"values": VALUES}, "compare": [WINDOW]}).json()
    reply, names = ComplexityReply.model_validate(answer), Names(sweep=Sweep(values=VALUES))
    options = PictureOptions(width=width, dpi=300, title="The time and the memory of one head beside a window's")
    assert faults(drawing.make_figure(reply, options, names)) == []


def test_a_png_is_one(http):
    image = Image.open(io.BytesIO(drawn(http, PNG)))
    assert image.format == "PNG"
    assert image.width > image.height > 300
    assert len(image.convert("L").getcolors()) > 10


@pytest.mark.sampled(fields=1, dimension=1, ticks=1)
@pytest.mark.parametrize(
    ("fields", "dimension", "ticks"),
    [
        pytest.param({}, "length", {"64", "4096"}, marks=pytest.mark.slow),
        pytest.param({"shape": {"queries": 1}}, "length", {"1", "64"}, marks=pytest.mark.slow),
        ({"shape": {"queries": 1, "past": 1000}}, "past", {"15", "1000"}),
        pytest.param({"shape": {"queries": 7, "keys": 128}}, "keys", {"2", "128"}, marks=pytest.mark.slow),
        pytest.param(
            {"sweep": {"dimension": "past", "values": [0, 100, 10]}}, "past", {"0", "10", "100"}, marks=pytest.mark.slow
        ),
        ({"sweep": {"dimension": "num_kv_heads", "values": [8, 1]}}, "num kv heads", {"1", "8"}),
    ],
)
def test_what_is_drawn_is_the_sweep_or_a_sensible_one(http, fields, dimension, ticks):
    texts = set(words(drawn(http, **fields)))
    assert dimension in texts
    assert ticks <= texts


def test_every_form_is_chosen_by_accept(http):
    for accept, media_type in (
        ("*/*", "application/json"),
        ("image/*", SVG),
        ("image/png", PNG),
        ("image/svg+xml;q=0.5, application/json;q=0.4", SVG),
    ):
        answer = http.post(f"/v1/attention/weights?{SMALL}", json={"query": [[1.0]]}, headers={"Accept": accept})
        assert answer.headers["content-type"].partition(";")[0] == media_type
    document = problem(http.post("/v1/attention/complexity", json=RAW, headers={"Accept": "image/gif"}))
    assert document["offered"] == ["application/json", SVG, PNG, PDF]
    assert problem(http.get("/v1/variants", headers={"Accept": PNG}))["status"] == 406


def test_without_the_extra_the_answer_names_it(http, monkeypatch):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    document = problem(http.post("/v1/attention/complexity", json=RAW, headers={"Accept": PNG}))
    assert document["status"] == 406
    assert "attention-service[plot]" in document["detail"]
    assert http.post("/v1/attention/complexity", json=RAW).status_code == 200


def test_clients_give_the_file_and_a_notebook_shows_it(client):
    client.modules.create("drawn", {"d_model": 8, "num_heads": 2}, seed=0)
    svg = client.plot().of(client.complexity, "drawn", 64, compare=[{"num_kv_heads": 1}])
    png = client.plot("png", width=320).of(client.weights, "drawn", np.ones((2, 8)))
    with pytest.raises(InvalidRequest):
        client.plot().of(client.complexity, "drawn", 64, compare=[{"num_kv_heads": 3}])
    assert re.match(rb"<\?xml", svg.data)
    assert "num_kv_heads 1" in words(svg.data)
    assert png.data.startswith(b"\x89PNG")
    assert svg._repr_mimebundle_() == {SVG: svg.data.decode()}
    assert png._repr_mimebundle_() == {PNG: png.data}
    assert "data" not in repr(png)


# ── weights and statistics ───────────────────────────────────────────────────────────────────────────────────────────

QUERY = np.random.default_rng(2).normal(size=(6, 8)).round(3).tolist()
WORDS = ["[CLS]", "the", "cat", "sat", ".", "[SEP]"]


@pytest.fixture(scope="module")
def module(client):
    client.modules.create("pictured", {"d_model": 8, "num_heads": 2}, seed=0)
    return "/v1/modules/pictured/weights"


def test_weights_are_drawn_with_labels_and_the_facts_of_their_making(http, module):
    given = {"query": QUERY, "labels": WORDS}
    answer = http.post(f"{module}?{SMALL}", json=given, headers={"Accept": SVG, "X-Request-ID": "seen-1"})
    assert answer.headers["content-type"].startswith(SVG)
    texts = words(answer.content)
    assert {"H0", "H1", "[CLS]", "cat", "[SEP]"} <= set(texts)
    assert "pictured · weights · 2 heads" in " ".join(texts)
    facts = json.loads(
        next(ET.fromstring(answer.content).iter("{http://purl.org/dc/elements/1.1/}description")).text  # noqa: S314
    )
    plain = http.post(module, json={"query": QUERY}).json()
    assert (facts["module"], facts["version"]) == ("pictured", plain["ran"]["version"])
    assert (facts["request_id"], facts["shape"], facts["operation"]) == ("seen-1", [2, 6, 6], "weights")
    assert facts["config"]["num_heads"] == 2
    assert facts["options"] == {"width": 320}


def test_one_head_has_the_numbers_of_the_reply(http, module):
    texts = words(drawn(http, path=f"{module}?view=head&head=1&dpi=72", query=QUERY, labels=WORDS))
    weights = np.array(http.post(module, json={"query": QUERY}).json()["weights"][1])
    assert {f"{weight:.2f}" for weight in weights.ravel() if weight >= 0.01} <= set(texts)
    assert "H1" in " ".join(texts)


@pytest.mark.slow
def test_raw_attention_sessions_and_recordings_are_drawn_too(http, module):
    png = Image.open(io.BytesIO(drawn(http, PNG, f"/v1/attention/weights?{SMALL}&view=lines", query=QUERY)))
    assert (png.format, png.width) == ("PNG", 320)
    session = http.post("/v1/modules/pictured/sessions", json={}).json()["session"]
    http.post(f"/v1/sessions/{session}/step", json={"query": QUERY[:4], "return": ["weights"]})
    texts = words(drawn(http, SVG, f"/v1/sessions/{session}/weights?width=480", query=QUERY[4:], labels=WORDS))
    assert "2 queries × 6 keys" in " ".join(texts)
    assert texts.count(".") == 3, "the label of a key of each head, and of the first new query"
    file = {
        "model": "tiny", "text": "a b", "created": "2026-01-02T03:04:05Z", "tokens": {"layers": ["a", "b"]},
        "attentions": [{"name": "layers.0", "heads": ["L0H0"]}], "layers": {"0.weights": [[[1.0, 0.0], [0.5, 0.5]]]},
    }  # fmt: skip
    recording = http.post("/v1/recordings", json=file).json()["id"]
    texts = words(drawn(http, SVG, f"/v1/recordings/{recording}/statistics?{SMALL}", statistics=["entropy"]))
    assert {"entropy, nats", "layers.0", "L0H0"} <= set(texts)


def test_what_edits_change_is_drawn_about_zero(http, module):
    edits = [{"tap": "weights", "heads": [1], "keys": [0], "set": 0}]
    given = {"query": QUERY, "edits": edits, "compare": "unedited"}
    texts = words(drawn(http, SVG, f"{module}?{SMALL}&view=statistics&palette=puor", **given))
    assert any("diverges from 0" in text for text in texts)
    document = problem(http.post(f"{module}?palette=viridis", json=given, headers={"Accept": SVG}))
    assert (document["status"], document["param"]) == (422, "palette")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("view=costs", "view"),
        ("view=map", "view"),
        ("theme=blue", "theme"),
        ("palette=jet", "palette"),
        ("palette=rdbu", "palette"),
        ("width=20000", "width"),
        ("width=160", "width"),
        ("width=480&dpi=300", "width"),
        ("background=red", "background"),
        ("title=", "title"),
        ("dpi=x", "dpi"),
        ("scale=square", "scale"),
        ("colour=red", "colour"),
        ("width=300&width=400", "width"),
        ("view=head&head=7", "head"),
        ("sequence=1", "sequence"),
    ],
)
def test_an_option_that_cannot_be_is_named(http, module, query, param):
    document = problem(http.post(f"{module}?{query}", json={"query": QUERY}, headers={"Accept": SVG}))
    assert (document["status"], document["param"]) == (422, param)
    assert param in document["detail"]


@pytest.mark.slow
def test_the_least_width_is_named_where_a_picture_is_too_small(http, module):
    for query, least in (("width=160", 240), ("width=480&dpi=300", 750), ("width=239", 240)):
        document = problem(http.post(f"{module}?{query}", json={"query": QUERY}, headers={"Accept": PNG}))
        assert f"at least {least}" in document["detail"]
    for path in ("width=240", "width=750&dpi=300", "width=240&view=head", "width=240&view=lines"):
        drawn(http, PNG, f"{module}?{path}", query=QUERY, labels=WORDS)


def test_a_title_is_given_or_left_out(http, module):
    texts = words(drawn(http, SVG, f"{module}?title=Figure 1", query=QUERY))
    assert "Figure 1" in texts
    assert not any("pictured" in text for text in texts)
    assert not any("pictured" in text for text in words(drawn(http, SVG, f"{module}?title=none", query=QUERY)))


def test_a_picture_of_one_head_computes_the_others_for_their_range_if_they_are_small(monkeypatch):
    request, options = RawWeightsRequest(query=np.ones((4, 6, 8))), PictureOptions(view="head", head=2)
    assert pictures.with_needs(request, options, None).select is None
    monkeypatch.setattr(pictures, "_SHARED_RANGE", 4 * 6 * 6 - 1)
    assert pictures.with_needs(request, options, None).select.heads == [2]


def test_labels_are_one_for_each_token(http, module):
    for field, labels in (("labels", WORDS[:5]), ("query_labels", [*WORDS, "more"])):
        document = problem(http.post(module, json={"query": QUERY, field: labels}, headers={"Accept": SVG}))
        assert (document["status"], document["param"]) == (422, field)
    assert http.post(module, json={"query": QUERY, "labels": WORDS}).json()["weights"]


def test_a_file_of_tensors_is_answered_with_one_by_default(http, module):
    body = safetensors.numpy.save({"query": np.array(QUERY, np.float32)})
    answer = http.post(module, content=body, headers={"Content-Type": SAFETENSORS})
    assert answer.headers["content-type"] == SAFETENSORS


def test_the_options_are_documented(http):
    paths = http.get("/openapi.json").json()["paths"]
    parameters = {each["name"]: each for each in paths["/v1/modules/{name}/weights"]["post"]["parameters"]}
    assert set(PictureOptions.model_fields) <= parameters.keys()
    assert parameters["view"]["schema"]["enum"] == ["heads", "head", "lines", "statistics"]
    assert parameters["width"]["schema"]["maximum"] == 4096
    assert PDF in paths["/v1/modules/{name}/weights"]["post"]["responses"]["200"]["content"]


@pytest.mark.sampled(path=3, fields=3, text=3)
@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("attribution?view=head&head=1", {"query": QUERY, "labels": WORDS}, {"[CLS]", "gradient attention, H1"}),
        ("attribution", {"query": QUERY, "methods": ["head_importance"]}, {"head importance"}),
        ("circuits?theme=dark", {}, {"W_QK", "W_OV", "H1", "q_proj.weight"}),
        ("circuits?view=composition", {"with": "pictured"}, {"Q composition", "later head"}),
        ("forward?palette=puor", {"query": QUERY, "return": ["weights"]}, {"number", "output"}),
        (
            "forward",
            {"query": QUERY, "edits": [{"tap": "v", "set": 0}], "compare": "unedited"},
            {"number", "change of the output"},
        ),
        ("effects", {"query": QUERY, "sweep": {"tap": "context", "set": 0}}, {"H1", "relative"}),
    ],
)
def test_further_replies_about_a_module_are_drawn(http, module, path, fields, text):
    drawing = drawn(http, SVG, f"{module.removesuffix('weights')}{path}", **fields)
    assert text <= set(words(drawing))


def test_the_palette_suits_the_attribution(http, module):
    path = f"{module.removesuffix('weights')}attribution?palette="
    document = problem(http.post(f"{path}magma", json={"query": QUERY}, headers={"Accept": SVG}))
    assert document["param"] == "palette"
    given = {"query": QUERY, "methods": ["norm"]}
    assert problem(http.post(f"{path}puor", json=given, headers={"Accept": SVG}))["param"] == "palette"
    assert problem(http.post(path.partition("?")[0], json=given | {"labels": ["a"]}))["param"] == "labels"


def test_long_weights_are_pooled_where_they_are_computed(http, module, monkeypatch):
    monkeypatch.setattr(pictures, "_CELLS", 3)
    given = {"query": QUERY, "labels": WORDS}
    texts = words(drawn(http, SVG, f"{module}?width=480&view=head&head=1", **given))
    assert "pooled by maximum: a cell is 2 queries × 2 keys" in texts
    assert "H1 · 6 queries × 6 keys" in " ".join(texts)
    assert {"[CLS]", "cat", "."} <= set(texts)
    reply = http.post(module, json=given | {"pool": 4, "return_weights": False}).json()
    weights = np.array(http.post(module, json=given).json()["weights"])
    squares = [weights[:, :4, :4], weights[:, :4, 4:], weights[:, 4:, :4], weights[:, 4:, 4:]]
    expected = np.stack([square.max((1, 2)) for square in squares], -1).reshape(2, 2, 2)
    np.testing.assert_allclose(reply["pooled"], expected, rtol=1e-6)
    assert "weights" not in reply


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_drawn(http):
    body = {"query": np.ones((256, 1, 2)).tolist()}
    path = "/v1/attention/weights?view=statistics&width=4096&dpi=600"
    document = problem(http.post(path, json=body, headers={"Accept": PNG}))
    assert (document["status"], document["param"], document["limit"]) == (422, "dpi", MOST_PIXELS)
    assert drawn(http, SVG, path, **body)


def test_a_label_that_no_file_can_hold_is_refused(http):
    for label in ("a\ufffe", "\uffff", "a\x01"):
        body = RAW | {"compare": [{"label": label, "num_kv_heads": 1}]}
        document = problem(http.post("/v1/attention/complexity", json=body, headers={"Accept": SVG}))
        assert document["param"] == "compare.0.label"


@pytest.mark.slow
def test_drawing_takes_memory_of_the_budget_and_ends_by_the_deadline(tmp_path, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def slow(*_):
        began.set()
        go_on.wait(20)
        return Picture(media_type=PNG, data=b"")

    monkeypatch.setattr(drawing, "save", slow)
    monkeypatch.setattr(drawing, "saving_bytes", lambda *_: 12_345)
    body = {"query": QUERY}

    def ask(wait):
        return httpx.post(
            f"{url}/v1/attention/weights", json=body, headers={"Accept": PNG, "Prefer": f"wait={wait}"}, timeout=30
        )

    def held():
        return httpx.get(f"{url}/v1").json()["memory"]["in_flight_bytes"]

    with live_server(tmp_path) as url, ThreadPoolExecutor(2) as callers:
        first = callers.submit(ask, 1)
        assert began.wait(10)
        assert held() == 12_345
        waiting = ask(1)  # for its turn: it leaves at its deadline, and the first goes on
        assert (waiting.status_code, waiting.json()["code"]) == (503, "deadline_exceeded")
        assert held() == 12_345
        go_on.set()
        assert first.result().json()["code"] == "deadline_exceeded"
        assert held() == 0
        assert ask(5).status_code == 200
