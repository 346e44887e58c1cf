"""Pictures of whole models: labels in place of tokens, chosen keys, all heads in one figure, and what a number is."""

import json
import re

import numpy as np
import pytest
from tests.client.cli.command_line import invoke

from attention_client import InvalidRequest

pytest.importorskip("matplotlib")
TEXT = "the cat sat on the mat"
WORDS = ["BOS", "A", "B", "C", "D", "A", "F"]


def words(picture):
    return re.findall(r">([^<>]+)</text>", picture.data.decode())


def drawn(client, *args, options=None, **fields):
    return words(client.plot("svg", **(options or {})).of(client.models.weights, "tiny", TEXT, *args, **fields))


def test_tokens_are_the_labels_and_repeated_ones_have_their_position(client):
    shown = drawn(client, layers=[1], select={"heads": [0]})
    assert shown.count("cat") == 2
    assert {"the·1", "the·5"} <= set(shown)
    assert "attention weight, L1H0" in shown
    assert "the" in drawn(client, layers=[1], options={"token_positions": "none"})


def test_own_labels_take_their_place(client):
    shown = drawn(client, layers=[1], select={"heads": [0]}, labels=WORDS)
    assert shown.count("D") == 2
    assert shown.count("A") == 4, "as they are given"
    assert "cat" not in shown
    beside = drawn(client, layers=[1], select={"heads": [0]}, query_labels=WORDS)
    assert (beside.count("D"), beside.count("cat")) == (1, 1)
    reply = client.models.weights("tiny", TEXT, layers=[1], labels=WORDS, top_k=1)
    assert "BOS" in reply._repr_html_()
    assert "BOS" in words(reply.plot())


@pytest.mark.parametrize("field", ["labels", "query_labels"])
def test_a_wrong_number_of_labels_is_refused_by_name(client, field):
    with pytest.raises(InvalidRequest, match="expected 7 labels") as refused:
        client.models.weights("tiny", TEXT, **{field: WORDS[:6]})
    assert (refused.value.param, refused.value.status) == (field, 422)


def test_chosen_keys_are_columns_of_all_weights(client):
    whole = client.models.weights("tiny", TEXT, layers=[0, 3])
    part = client.models.weights("tiny", TEXT, layers=[0, 3], select={"heads": [1], "keys": [5, 0]}, top_k=2)
    for one, other in zip(whole.layers, part.layers, strict=True):
        np.testing.assert_allclose(other.weights, one.weights[[1]][..., [5, 0]], atol=1e-6)
        assert set(np.unique(other.top.keys)) <= {-1, 0, 5}
    shown = drawn(client, layers=[0], select={"heads": [1], "keys": [5, 0]})
    assert (shown.count("the·5"), shown.count("cat")) == (2, 1)
    with pytest.raises(InvalidRequest) as refused:
        client.models.weights("tiny", TEXT, select={"keys": [7]})
    assert refused.value.param == "select.keys"


def test_all_heads_are_in_one_figure(client):
    shown = drawn(client, options={"view": "heads", "width_mm": 85})
    assert {"L0", "L3", "H0", "H3", "attention weight"} <= set(shown)
    chosen = drawn(client, select={"heads": [1, 2]})
    assert {"H1", "H2", "L3"} <= set(chosen)
    assert "H0" not in chosen
    assert "attention weight, mean of all heads" in " ".join(drawn(client, average_heads=True))
    with pytest.raises(InvalidRequest) as refused:
        drawn(client, options={"view": "statistics"}, select={"heads": [1]})
    assert refused.value.param == "select"


def test_pooled_weights_have_the_labels_of_their_tokens(client):
    shown = drawn(client, layers=[0], select={"heads": [0]}, pool=2)
    assert any("pooled by maximum: a cell is 2 queries × 2 keys" in text for text in shown)
    assert "mat" in shown


def test_effects_say_what_changes(client):
    plot = client.plot("svg", width=1200)
    sweep = {"tap": "context", "over": ["layers", "heads"], "set": 0}
    for of, label in (
        (None, r"change of log p\(\S+\), nats"),
        ({"token": " mat", "against": " rug"}, r"change of log p\(mat\) − log p\(rug\), nats"),
        ({"token": " mat", "logit": True}, r"change of logit\(mat\)"),
    ):
        shown = words(plot.of(client.models.effects, "tiny", TEXT, sweep=sweep, of=of))
        assert any(re.fullmatch(label, text) for text in (" ".join(shown[-2:]), *shown)), list(shown)
    alone = words(plot.of(client.models.effects, "tiny", TEXT, sweep=sweep | {"over": ["heads"]}))
    assert any(text.startswith("change of log p(") for text in alone)
    assert "divergence, nats" in alone
    hidden = {"tap": "weights", "over": ["layers", "keys"], "set": 0}
    shown = words(plot.of(client.models.effects, "tiny", TEXT, sweep=hidden))
    assert {"L0", "L3", "the·1", "the·5", "mat"} <= set(shown)


def test_a_lens_has_the_labels_of_its_tokens(client):
    shown = words(client.plot("svg", width=1200).of(client.models.lens, "tiny", TEXT, layers=[1], labels=WORDS))
    plain = words(client.plot("svg", width=1200).of(client.models.lens, "tiny", TEXT, layers=[1]))
    assert shown.count("BOS") == 1
    assert [word for word in plain if shown.count(word) < plain.count(word)], "tokens give way to labels"
    reply = client.models.lens("tiny", TEXT, layers=[1], labels=WORDS)
    assert ">BOS</th>" in reply._repr_html_()
    assert "BOS" in words(reply.plot(width=1200))
    assert "first" in words(reply.plot(width=1200, labels=["first", *WORDS[1:]]))
    with pytest.raises(InvalidRequest, match="expected 7 labels, one for each token; got 2"):
        reply.plot(labels=["a", "b"])


GROUPS = [[1, 2, 3], [0, 4], [1, 2, 3, 4, 5, 6]]


def test_groups_of_tokens_are_named_by_their_tokens(client):
    sweep = {"tap": "weights", "over": ["layers", "keys"], "key_groups": GROUPS, "set": 0}
    plot = client.plot("svg", width=1600, token_positions="none")
    shown = words(plot.of(client.models.effects, "tiny", TEXT, sweep=sweep))
    assert {"the cat sat", "the … mat"} <= set(shown)
    shown = words(plot.of(client.models.effects, "tiny", TEXT, sweep=sweep, labels=WORDS))
    assert {"A B C", "BOS, D", "A … F"} <= set(shown)
    assert "1, 2, 3" not in shown
    reply = client.models.effects("tiny", TEXT, sweep=sweep, labels=WORDS)
    assert "BOS, D" in reply._repr_html_()
    assert "A B C" in words(reply.plot(width=1600))
    assert {"a b c"} <= set(words(reply.plot(width=1600, labels=[*"xabcdef"])))


def test_swept_tokens_have_the_labels_of_the_request(client):
    sweep = {"tap": "weights", "over": ["queries", "keys"], "set": 0}
    shown = words(client.plot("svg", width=1200).of(client.models.effects, "tiny", TEXT, sweep=sweep, labels=WORDS))
    assert (shown.count("BOS"), shown.count("A"), shown.count("cat")) == (2, 4, 0)


@pytest.mark.parametrize("question", ["lens", "effects"])
def test_labels_of_another_number_are_refused(client, question):
    swept = {"sweep": {"tap": "weights", "over": ["keys"], "set": 0}} if question == "effects" else {}
    with pytest.raises(InvalidRequest, match="expected 7 labels") as refused:
        getattr(client.models, question)("tiny", TEXT, labels=WORDS[:6], **swept)
    assert (refused.value.param, refused.value.status) == ("labels", 422)


def test_labels_without_swept_tokens_are_refused(client):
    with pytest.raises(InvalidRequest, match="swept queries and keys") as refused:
        client.models.effects("tiny", TEXT, sweep={"tap": "context", "over": ["heads"], "set": 0}, labels=WORDS)
    assert refused.value.param == "labels"


def test_the_command_draws_and_prints_the_labels(server, tmp_path):
    picture = tmp_path / "lens.svg"
    asked = ["--url", server, "lens", "tiny", TEXT, "--layer", "1", "--labels", " ".join(WORDS)]
    assert invoke([*asked, "--plot", str(picture)]).exit_code == 0
    assert ">BOS<" in picture.read_text("utf-8")
    printed = invoke(asked, env={"COLUMNS": "200"}).output
    assert all(f"{at} {label}" in printed for at, label in enumerate(WORDS))
    sweep = json.dumps({"tap": "weights", "over": ["keys"], "key_groups": GROUPS, "set": 0})
    printed = invoke(
        ["--url", server, "models", "effects", "tiny", TEXT, "--edit", sweep, "--labels", " ".join(WORDS)],
        env={"COLUMNS": "200"},
    ).output
    assert "BOS, D" in printed
    assert "A … F" in printed
