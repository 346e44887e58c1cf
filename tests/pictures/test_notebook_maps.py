"""Maps for notebooks: the numbers that they hold, what they leave out, and labels that break nothing."""

import base64
import json
import re

import numpy as np
import pytest
from tests.client.service import RAN

from attention_contract.request_names import names_of
from attention_contract.schemas.analyses.attribution import AttributionReply, AttributionRequest, Attributions
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics, StatisticsOfAttention
from attention_contract.schemas.attention import ForwardReply, ForwardRequest, Taps
from attention_contract.schemas.weights import HeadStatistics, WeightsDifferences, WeightsReply, WeightsRequest
from attention_pictures.notebook.notebook_maps import MOST_NUMBERS, Maps, html_of, maps_of, weight_maps


def data_of(html):
    """The data of one element of maps, with its numbers."""
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)[1])
    return data, np.frombuffer(base64.b64decode(data["values"]), "<f4").reshape(data["shape"])


def elements(html):
    """The HTML of each element of maps."""
    return re.split(r'(?=<div id="attention)', html)[1:]


def labels(count):
    return [str(index) for index in range(count)]


def reply(weights, queries):
    return WeightsReply(statistics=HeadStatistics(), queries=np.array(queries), weights=weights, ran=RAN)


@pytest.mark.parametrize(
    ("shape", "queries", "names"),
    [
        ((2, 3, 4), 3, ["H0", "H1"]),
        ((2, 2, 3, 4), [3, 3], [f"sequence {b}, H{h}" for b in (0, 1) for h in (0, 1)]),
        ((2, 3, 4), [3, 3], ["sequence 0, mean of the heads", "sequence 1, mean of the heads"]),
        ((3, 4), 3, ["mean of the heads"]),
    ],
)
def test_a_reply_shows_every_head(shape, queries, names, rng):
    weights = rng.random(shape).astype(np.float32)
    data, shown = data_of(reply(weights, queries)._repr_html_())
    assert data["names"] == names
    assert (data["rows"], data["columns"], data["note"]) == (labels(3), labels(4), "")
    np.testing.assert_array_equal(shown, weights.reshape(-1, 3, 4))


@pytest.mark.parametrize(
    ("shape", "output", "names"),
    [
        ((1, 2, 3, 3), (1, 2, 3, 5), ["H0", "H1"]),
        ((2, 3, 3), (3, 8), ["H0", "H1"]),
        ((2, 3, 3), (2, 3, 8), ["map 0", "map 1"]),
        ((3, 3), (3, 8), ["map 0"]),
        ((2, 3, 3), None, ["map 0", "map 1"]),
    ],
)
def test_a_forward_reply_names_heads_where_it_can(shape, output, names, rng):
    made = ForwardReply(weights=rng.random(shape), output=None if output is None else np.zeros(output), ran=RAN)
    assert data_of(made._repr_html_())[0]["names"] == names


def test_an_output_alone_is_a_table_of_fields_and_a_map():
    shown = ForwardReply(output=np.zeros((3, 8)), ran=RAN)._repr_html_()
    assert "<caption>ForwardReply</caption>" in shown
    assert data_of(shown)[0]["title"] == "output"


def test_differences_are_maps_of_their_own_that_diverge_from_0(rng):
    weights, moved = rng.normal(size=(2, 2, 3, 4)).astype(np.float32)
    differences = WeightsDifferences(weights=moved, statistics=HeadStatistics(entropy=np.array([0.5, -1], np.float32)))
    made = WeightsReply(
        statistics=HeadStatistics(), queries=np.array(3), weights=weights, differences=differences, ran=RAN
    )
    (plain, _), (signed, shown), (statistics, entropies) = map(data_of, elements(made._repr_html_()))
    assert [each["signed"] for each in (plain, signed, statistics)] == [False, True, True]
    np.testing.assert_array_equal(shown, moved)
    assert (statistics["kind"], statistics["names"], statistics["columns"]) == (
        "Statistic", ["entropy"], ["H0", "H1"]
    )  # fmt: skip
    np.testing.assert_array_equal(entropies, [[[0.5, -1]]])
    output = rng.normal(size=(1, 3, 5)).astype(np.float32)
    forward = ForwardReply(output=output, differences=Taps(output=output - 1), ran=RAN)
    data, shown = data_of(forward._repr_html_())
    assert data["signed"]
    np.testing.assert_array_equal(shown, output - 1)


def test_large_differences_are_pooled_by_magnitude_and_share_the_space(rng):
    weights, moved = rng.normal(size=(2, 8, 120, 120)).astype(np.float32)
    maps = weight_maps(weights, moved, averaged=False)
    html = html_of(maps)
    data, shown = data_of(elements(html)[1])
    assert data["note"].startswith("Pooled by largest magnitude: a cell is ")
    by = 120 // shown.shape[1]
    cells = moved.reshape(8, 120 // by, by, 120 // by, by).swapaxes(2, 3).reshape(*shown.shape, by * by)
    expected = np.take_along_axis(cells, np.abs(cells).argmax(-1)[..., None], -1)[..., 0]
    np.testing.assert_array_equal(shown, expected)
    assert len(html) < 300_000


def test_the_labels_of_the_request_stand_at_the_sides(rng):
    weights = rng.random((2, 2, 4)).astype(np.float32)
    made = reply(weights, 2)
    names = names_of(
        WeightsRequest(
            query=np.ones((4, 8)),
            labels=["the", "cat", "sat"],
            select={"heads": [5, 3], "queries": [2, 0]},
            query_labels=list("abcd"),
        )
    )
    object.__setattr__(made, "_names", names)
    data, _ = data_of(made._repr_html_())
    assert (data["names"], data["rows"]) == (["H5", "H3"], ["c", "a"])
    assert data["columns"] == ["the", "cat", "sat", "3"], "a key that the module adds has its number"


def test_attributions_show_pairs_of_tokens_with_their_labels(rng):
    by_head, merged = rng.normal(size=(2, 3, 3)).astype(np.float32), rng.random((3, 3)).astype(np.float32)
    found = {"gradient_attention": by_head, "relevance": merged, "head_importance": np.ones(2)}
    made = AttributionReply(**found, differences=Attributions(relevance=-merged), ran=RAN)
    request = AttributionRequest(query=np.ones((3, 8)), labels=["a", "b", "c"])
    object.__setattr__(made, "_names", names_of(request))
    shown = [data_of(each) for each in elements(made._repr_html_())]
    assert [(data["title"], data["signed"], data["names"]) for data, _ in shown] == [
        ("Gradient attention", True, ["H0", "H1"]),
        ("Relevance", False, ["mean of the heads"]),
        ("Differences of relevance", True, ["mean of the heads"]),
    ]
    for (data, values), expected in zip(shown, (by_head, merged[None], -merged[None]), strict=True):
        assert data["rows"] == data["columns"] == ["a", "b", "c"]
        np.testing.assert_array_equal(values, expected)
    alone = AttributionReply(head_importance=np.ones(2), ran=RAN)
    assert data_of(alone._repr_html_())[0]["title"] == "head importance"


def test_a_forward_reply_of_the_client_names_what_was_selected(rng):
    made = ForwardReply(weights=rng.random((2, 1, 3)), output=np.zeros((4, 8)), ran=RAN)
    request = ForwardRequest(query=np.ones((4, 8)), select={"heads": [5, 3], "queries": [2]}, return_=["weights"])
    object.__setattr__(made, "_names", names_of(request))
    data, _ = data_of(made._repr_html_())
    assert (data["names"], data["rows"]) == (["H5", "H3"], ["2"])


def test_long_labels_are_clipped():
    html = Maps(np.eye(2)[None], ["h"], ["a" * 5000, "b"], ["c", "d" * 5000], "Weights").html()
    assert len(html) < 12_000
    assert data_of(html)[0]["rows"] == ["a" * 40 + "…", "b"]


def test_a_reply_without_weights_shows_its_fields():
    assert "<table" in reply(None, 3)._repr_html_()


def test_statistics_show_layers_by_heads():
    heads = [["A", "B"], ["A", "B", "C"]]
    entropies = [np.array([0, 1], np.float32), np.array([1, 2, 3], np.float32)]
    attentions = [
        StatisticsOfAttention(name=f"layers.{at}", heads=of, queries=4, statistics=HeadStatistics(entropy=entropy))
        for at, (of, entropy) in enumerate(zip(heads, entropies, strict=True))
    ]
    data, shown = data_of(RecordingStatistics(id="0" * 32, attentions=attentions)._repr_html_())
    assert (data["names"], data["rows"], data["columns"]) == (["entropy"], ["layers.0", "layers.1"], ["H0", "H1", "H2"])
    np.testing.assert_array_equal(shown, [[[0, 1, np.nan], [1, 2, 3]]])


def test_large_maps_are_pooled_by_maximum_and_say_so(rng):
    weights = rng.random((1, 300, 300)).astype(np.float16)
    html = maps_of(weights, "Weights").html()
    data, shown = data_of(html)
    assert data["note"] == "Pooled by maximum: a cell is 3 rows × 3 columns."
    np.testing.assert_array_equal(shown, weights.reshape(1, 100, 3, 100, 3).max((2, 4)))
    assert data["rows"][:2] == ["0 … 2", "3 … 5"]
    many = maps_of(rng.random((500, 40, 40)), "Weights").html()
    data, shown = data_of(many)
    assert shown.size <= MOST_NUMBERS
    assert "more of them are left out" in data["note"]
    assert max(map(len, (html, many))) < 300_000


def test_labels_cannot_leave_their_element():
    evil = '</script><img src=x onerror="alert(1)">'
    html = Maps(np.eye(2)[None], [evil], [evil, "b"], ["a", evil], evil).html()
    assert "<img" not in html
    assert html.count("</script>") == 2
    assert data_of(html)[0]["rows"] == [evil, "b"]


def test_without_numbers_nothing_breaks():
    assert "There are no numbers" in maps_of(np.zeros((1, 0, 0)), "Weights").html()
