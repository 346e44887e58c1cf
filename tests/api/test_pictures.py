"""Costs as pictures: files of the kind asked for, which show what the JSON reply has."""

import io
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from PIL import Image

from attention_client import Client
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.answers import Crossover
from attention_contract.schemas.complexity import ComplexityReply, Sweep
from attention_service.api import pictures
from tests.api.talk import problem

RAW = {"shape": {"queries": 4096}, "num_heads": 8, "head_dim": 64}
WINDOW = {
    "label": "a window",
    "kernel": "blocked",
    "spec": {"masks": [{"name": "sliding_window", "left": 64, "right": 64}]},
}
SVG, PNG = "image/svg+xml", "image/png"


def drawn(http, media_type=SVG, **fields):
    answer = http.post("/v1/attention/complexity", json=RAW | fields, headers={"Accept": media_type})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith(media_type)
    assert answer.headers["vary"] == "Accept"
    return answer.content


def words(svg):
    return [text.text for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314 - our own


def test_an_svg_names_the_lines_the_axes_and_where_they_cross(http):
    fields = {"compare": [WINDOW], "sweep": {"values": [64, 256, 1024, 16384]}, "kernel": "fused"}
    told = words(drawn(http, **fields))
    assert {"request", "a window", "free", "length", "bytes", "64", "16384"} <= set(told)
    assert any("seconds" in text for text in told)
    reply = http.post("/v1/attention/complexity", json=RAW | fields).json()
    crossings = {
        f"{found['cheaper']} from {found['at']}"
        for found in reply["crossovers"]
        if found["of"] == "time" and found.get("at", 0) >= 64
    }
    assert crossings <= set(told)


VALUES = [64, 1024, 16384]


@pytest.fixture
def drawn_of(http):
    """A picture of so many things compared, under names, that cross one another at these lengths."""
    told = http.post("/v1/attention/complexity", json=RAW | {"sweep": {"values": VALUES}}).json()
    reply = ComplexityReply.model_validate(told)

    def draw(labels, lengths=()):
        compared = [reply.series[0].model_copy(update={"label": label}) for label in labels]
        crossovers = [
            Crossover(of="time", between=(labels[0], label), dimension="length", searched=(1, 2), cheaper=label, at=at)
            for label, at in zip(labels[1:], lengths, strict=False)
        ]
        doctored = reply.model_copy(update={"compared": compared, "crossovers": crossovers})
        return pictures.draw(doctored, Sweep(values=VALUES), SVG)

    return draw


LONG = [f"blocked, sliding_window (left {2**size}, right {2**size}), softcap 30, alibi" for size in range(17)]


def test_many_lines_leave_out_what_would_hide_them_and_say_so(drawn_of):
    told = words(drawn_of(LONG, range(100, 8000, 500)))
    assert all(told.count(label) == 1 for label in LONG), "one legend for both"
    (note,) = [text for text in told if "left out" in text]
    assert "the intervals of times" in note
    assert "16 crossovers of time" in note
    assert not any(" from " in text for text in told)
    few = words(drawn_of(LONG[:3], [100, 2000]))
    assert not any("left out" in text for text in few)
    assert len([text for text in few if text.endswith((" from 100", " from 2000"))]) == 2


def test_legends_stay_within_the_picture_and_lines_can_be_told_apart(drawn_of):
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


def test_a_png_is_one(http):
    image = Image.open(io.BytesIO(drawn(http, PNG)))
    assert image.format == "PNG"
    assert image.width > image.height > 300
    assert len(image.convert("L").getcolors()) > 10


@pytest.mark.parametrize(
    ("fields", "dimension", "ticks"),
    [
        ({}, "length", {"64", "4096"}),
        ({"shape": {"queries": 1}}, "length", {"1", "64"}),
        ({"shape": {"queries": 1, "past": 1000}}, "past", {"15", "1000"}),
        ({"shape": {"queries": 7, "keys": 128}}, "keys", {"2", "128"}),
        ({"sweep": {"dimension": "past", "values": [0, 100, 10]}}, "past", {"0", "10", "100"}),
        ({"sweep": {"dimension": "num_kv_heads", "values": [8, 1]}}, "num kv heads", {"1", "8"}),
    ],
)
def test_what_is_drawn_is_the_sweep_or_a_sensible_one(http, fields, dimension, ticks):
    told = set(words(drawn(http, **fields)))
    assert dimension in told
    assert ticks <= told


def test_every_form_is_chosen_by_accept(http):
    for accept, media_type in (
        ("*/*", "application/json"),
        ("image/*", SVG),
        ("image/png", PNG),
        ("image/svg+xml;q=0.5, application/json;q=0.4", SVG),
    ):
        answer = http.post("/v1/attention/complexity", json=RAW, headers={"Accept": accept})
        assert answer.headers["content-type"].partition(";")[0] == media_type
    document = problem(http.post("/v1/attention/complexity", json=RAW, headers={"Accept": "image/gif"}))
    assert document["offered"] == ["application/json", SVG, PNG]
    assert problem(http.get("/v1/variants", headers={"Accept": PNG}))["status"] == 406


def test_without_the_extra_the_answer_names_it(http, monkeypatch):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    document = problem(http.post("/v1/attention/complexity", json=RAW, headers={"Accept": PNG}))
    assert document["status"] == 406
    assert "attention-service[plot]" in document["detail"]
    assert http.post("/v1/attention/complexity", json=RAW).status_code == 200


def test_clients_give_the_file_and_a_notebook_shows_it(server):
    with Client(server) as client:
        client.modules.create("drawn", {"d_model": 8, "num_heads": 2}, seed=0)
        svg = client.complexity_picture("drawn", 64, compare=[{"num_kv_heads": 1}])
        png = client.complexity_picture("drawn", 64, media_type="image/png")
        with pytest.raises(InvalidRequest):
            client.complexity_picture("drawn", 64, compare=[{"num_kv_heads": 3}])
    assert re.match(rb"<\?xml", svg.data)
    assert "num_kv_heads 1" in words(svg.data)
    assert png.data.startswith(b"\x89PNG")
    assert svg._repr_mimebundle_() == {SVG: svg.data.decode()}
    assert png._repr_mimebundle_() == {PNG: png.data}
    assert "data" not in repr(png)
