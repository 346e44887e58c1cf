"""What the heads of a model look at, as tables: of one text and of several, of all heads and of a few."""

import re
import time

import numpy as np
import pytest

from attention_client.cli.commands import model_progress
from attention_client.cli.tables import reply_tables
from attention_client.cli.tables.block_map import MOST, print_map
from attention_client.cli.tables.model_tables import changed, differentiated, looked, model_ran, predicted, readable
from attention_contract.errors import ModelNotFound
from attention_contract.request_names import names_of
from attention_contract.schemas.analyses.model_effects import ModelEffects, ModelEffectsReply
from attention_contract.schemas.attention import Select
from attention_contract.schemas.model_requests import (
    LayerGradients,
    LayerTaps,
    LayerWeights,
    LikelyToken,
    ModelForwardReply,
    ModelGradientsReply,
    ModelWeightsReply,
    ModelWeightsRequest,
    Prediction,
)
from attention_contract.schemas.models import LayerGeneration, ModelInfo, ModelLayer, ModelList
from attention_contract.schemas.prompts import ModelRan, TokenLabelsReply
from attention_contract.schemas.weights import HeadStatistics, TopKeys

RAN = ModelRan(
    model="net", architecture="Net", device="cpu", dtype="float32", kernels=["fused"], compute_ms=1, queue_ms=0,
    load_ms=1500, peak_bytes=1,
)  # fmt: skip
LABELS = TokenLabelsReply(tokens=["<s>", " the", "\n"], ids=[0, 1, 2], spans=[None, (0, 4), (4, 5)])
KEYS = np.array([[[0, -1], [0, 1], [1, 2]], [[0, -1], [1, 0], [2, 0]]])
WEIGHTS = np.array([[[1, 0], [0.75, 0.25], [0.6, 0.3]], [[1, 0], [0.5, 0.5], [0.9, 0.1]]], np.float32)


def layer(name, entropy, heads=slice(None), several=False):
    wrap = (lambda x: np.stack([x, x])) if several else (lambda x: x)
    return LayerWeights(
        layer=name, statistics=HeadStatistics(entropy=wrap(np.array(entropy))), queries=wrap(np.array(3)),
        top=TopKeys(keys=wrap(KEYS[heads]), weights=wrap(WEIGHTS[heads])),
    )  # fmt: skip


def reply(layers, request=None, labels=LABELS):
    made = ModelWeightsReply(labels=labels, ran=RAN, layers=layers)
    object.__setattr__(made, "_names", names_of(request or ModelWeightsRequest(text="the\n"), "net"))
    return made


def test_a_row_for_each_head_has_its_statistics_and_its_largest_weights(capsys):
    looked(reply([layer(0, [0.5, 0.25]), layer("cross.1", [0.125, 1.5])]))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:2] == ["head", "entropy"]
    assert rows[1] == ["L0H0", "0.5", "the", "→", "<s>", "(0.75)", "'\\n'", "→", "the", "(0.60)"]
    assert rows[4][:3] == ["cross.1", "H1", "1.5"]
    text = " ".join(rows[-1])
    assert text == "net (Net) on cpu in float32: 1 ms (queued 0), loaded in 1.5 s, fused"
    assert rows[6] == ["token", "L0H0", "L0H1", "cross.1", "H0", "cross.1", "H1"], "few heads: a row for each token"
    assert rows[8][:9] == ["the", "<s>", "(0.75)", "the", "(0.25)", "the", "(0.50)", "<s>", "(0.50)"]


def test_a_row_for_each_path_that_there_is_the_largest_effect_first(capsys):
    ends = {"from": [{"part": "heads", "layer": 0, "head": 1}, {"part": "mlps", "layer": 1}, {"part": "embeddings"}],
            "to": [{"part": "k", "layer": 1, "head": 0}, {"part": "logits"}]}  # fmt: skip
    value = np.array([[0.5, 0.25], [np.nan, -2.0], [1.0, 0.125]], np.float32)
    effects = ModelEffects(value=value, divergence=abs(value))
    changed(ModelEffectsReply(swept=ends, baseline=np.ones(()), labels=LABELS, ran=RAN, effects=effects))
    text = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in text.splitlines()]
    begin = next(at for at, row in enumerate(rows) if "from" in row and "to" in row) + 1
    assert rows[begin : begin + 5] == [
        "0 mlp 1 logits -2 2", "0 embeddings 1.0 k 1 1", "0 0.1 1.0 k 0.5 0.5", "0 0.1 logits 0.25 0.25",
        "0 embeddings logits 0.125 0.125",
    ], text  # fmt: skip


def test_a_selected_head_keeps_its_number(capsys):
    request = ModelWeightsRequest(text="the\n", select=Select(heads=[1]))
    looked(reply([layer(0, [0.5, 0.25], heads=slice(1, 2))], request))
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:2] == ["L0H1", "0.25"]
    assert "L0H1" in out.splitlines()[3]
    assert "L0H0" not in out.splitlines()[3]


def test_selected_rows_have_their_tokens(capsys):
    request = ModelWeightsRequest(text="the\n", select=Select(heads=[0], queries=[1]))
    whole = layer(0, [0.5, 0.25])
    top = TopKeys(keys=KEYS[:1, 1:2], weights=WEIGHTS[:1, 1:2])
    looked(reply([whole.model_copy(update={"top": top})], request))
    assert "the    <s> (0.75)  the (0.25)" in capsys.readouterr().out


def test_own_labels_stand_in_the_place_of_tokens(capsys):
    request = ModelWeightsRequest(text="the\n", labels=["A", "B", "C"], select={"heads": [0], "keys": [1]})
    whole = layer(0, [0.5, 0.25])
    top = TopKeys(keys=KEYS[:1, :, :1], weights=WEIGHTS[:1, :, :1])
    looked(reply([whole.model_copy(update={"top": top, "weights": WEIGHTS[:1, :, [1]]})], request))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1"], "the number of the chosen key"
    assert any(line.split()[:2] == ["B", "A"] for line in lines)
    assert not any("the" in line.split() for line in lines)


def test_each_text_of_a_batch_has_its_tables(capsys):
    looked(reply([layer(0, [0.5, 0.25], several=True)], labels=[LABELS, LABELS]))
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("text")] == ["text 0", "text 1"]
    assert out.count("the → <s> (0.75)") == 2


def test_statistics_alone_are_a_table_too(capsys):
    bare = layer(0, [0.5, 0.25])
    looked(reply([LayerWeights(layer=0, statistics=bare.statistics, queries=bare.queries)]))
    assert "largest" not in capsys.readouterr().out


def test_predictions_name_their_token_and_the_unedited_probability(capsys):
    likely = LikelyToken(token=" mat", id=7, logit=1, probability=0.5, unedited_probability=0.25, unedited_logit=0)
    taps = LayerTaps(layer=0, hidden=np.zeros((3, 8), np.float32))
    found = Prediction(text=0, position=1, top=[likely], divergence=0.125)
    predicted(ModelForwardReply(labels=LABELS, ran=RAN, predictions=[found], layers=[taps]))
    out = capsys.readouterr().out
    assert "1 the  mat (0.500, unedited 0.250)       0.125" in out
    assert "hidden  [3, 8]" in out


def test_tokens_are_readable():
    assert [readable(token) for token in (" the", "\n", "  ", "<s>")] == ["the", "'\\n'", "'  '", "<s>"]


class Loading:
    """A client whose model loads."""

    def __init__(self):
        self.models, self.names = self, []

    def get(self, model, retries):
        self.names.append(model)
        if len(self.names) == 1:
            raise ModelNotFound("not yet")
        progress = 0.25 * len(self.names)
        state = "loading" if progress < 1 else "resident"
        return ModelInfo(id=model, created=1, checkpoint="net", state=state, progress=progress)


def test_a_bar_shows_the_progress_of_a_model_that_loads(monkeypatch):
    client, drawn = Loading(), []
    monkeypatch.setattr(model_progress, "_SECONDS", 0.01)
    monkeypatch.setattr("rich.progress.Progress.update", lambda _, task, completed: drawn.append(completed))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with model_progress.loading_shown(client, "net"):
        while len(client.names) < 6:
            time.sleep(0.01)
    assert drawn[:4] == [0.5, 0.75, 1.0, 1.0]


def test_nothing_is_requested_where_nobody_watches():
    client = Loading()
    with model_progress.loading_shown(client, "net"):
        time.sleep(0.01)
    assert client.names == []


ENCODER = TokenLabelsReply(tokens=["x", "y", "z"], ids=[5, 6, 7], spans=[(0, 1), (1, 2), (2, 3)])


@pytest.mark.parametrize(
    ("name", "pair"),
    [("encoder.0", "z → y (0.60)"), ("cross.0", "'\\n' → y (0.60)"), ("decoder.0", "'\\n' → the (0.60)")],
)
def test_a_layer_of_a_pair_has_the_tokens_of_its_stacks(capsys, name, pair):
    looked(ModelWeightsReply(labels=LABELS, encoder_labels=ENCODER, ran=RAN, layers=[layer(name, [0.5, 0.25])]))
    assert pair in capsys.readouterr().out


@pytest.mark.parametrize("several", [False, True])
def test_gradients_are_shown_by_token_and_by_head(capsys, several):
    wrap = (lambda x: np.stack([x, x])) if several else (lambda x: x)
    made = LayerGradients(layer=0, heads=wrap(np.array([0.5, -0.25])), gradients={"hidden": wrap(np.zeros((3, 8)))})
    differentiated(
        ModelGradientsReply(
            labels=[LABELS] * 2 if several else LABELS,
            ran=RAN,
            value=wrap(np.array(-1.5)),
            tokens=wrap(np.array([0.125, 1.0, 2.0])),
            layers=[made],
        )
    )
    out = capsys.readouterr().out
    assert out.count("value -1.5") == out.count("<s>") == 1 + several
    assert ["1", "the", "1"] in [row.split() for row in out.splitlines()]
    assert ["0", "0.5", "-0.25"] in [row.split() for row in out.splitlines()]
    assert "hidden" in out


def test_layers_that_see_images_are_shown_for_the_first_crop(capsys):
    effects = reply([layer(0, [0.5, 0.25]), layer("vision.0", [0.125, 1.5], several=True)])
    crop = TokenLabelsReply(tokens=["CLS", "[0,0]", "[0,1]"], ids=[0, 1, 2], spans=[None] * 3)
    object.__setattr__(effects, "image_labels", [crop, crop])
    looked(effects)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[3][:3] == ["vision.0", "H0", "0.125"]
    assert rows[3][3:6] == ["[0,0]", "→", "CLS"]


def test_a_map_has_a_row_for_each_query_and_a_shade_for_each_weight(capsys):
    print_map("0.1", np.array([[1.0, 0.0], [0.6, 0.3], [0.06, 0.04]]), ["a", "b" * 20, "c"])
    title, head, *rows, legend = capsys.readouterr().out.splitlines()
    assert title == "0.1"
    assert head.split() == ["0", "1"]
    places = [head.index("0") - 1, head.index("1") - 1]
    assert [[row[at : at + 2] for at in places] for row in rows] == [["██", "  "], ["▓▓", "▒▒"], ["░░", "  "]]
    assert [row.split()[1] for row in rows] == ["a", f"{'b' * 13}…", "c"]
    assert legend.split("  ") == ["░░ from 0.05", "▒▒ from 0.25", "▓▓ from 0.5", "██ from 0.75"]


def test_a_map_of_some_queries_names_them_by_their_numbers(capsys):
    print_map("0.1", np.eye(2), ["a", "b"], [4, 6], [3, 12])
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()[2:4]] == ["4", "6"]


def test_a_map_that_does_not_fit_a_terminal_is_left_out(capsys):
    print_map("0.1", np.zeros((1, MOST + 1)), ["a"])
    assert capsys.readouterr().out == ""


def test_maps_stand_before_the_tables_of_a_few_heads_whose_weights_came(capsys):
    one = layer(0, [0.5, 0.25]).model_copy(update={"weights": WEIGHTS[:, :, [0, 1, 1]]})
    looked(reply([one]))
    lines = capsys.readouterr().out.splitlines()
    first, second = lines.index("L0H0"), lines.index("L0H1")
    assert first < second < next(at for at, text in enumerate(lines) if text.startswith("head"))


def test_models_show_who_is_answered_and_who_waits(capsys):
    model = ModelInfo(id="net", created=1, checkpoint="net", state="resident", running=2, waiting=14)
    reply_tables.show(ModelList(data=[model]))
    heading, row = (re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines())
    assert dict(zip(heading, row, strict=True)).items() >= {"running": "2", "waiting": "14"}.items()
    reply_tables.show(model)
    shown = dict((*line.split(), "")[:2] for line in capsys.readouterr().out.splitlines())
    assert (shown["running"], shown["waiting"]) == ("2", "14")


def test_layers_that_are_alike_are_one_row_of_a_model(capsys):
    full = ModelLayer(layer=0, heads=8, kv_heads=2, head_dim=64, taps=["q", "weights"], edits=["q"])
    generation = LayerGeneration(attention=False, edits=[], refused={"q": "a state"})
    own = {"layer": 3, "kind": "linear", "refused": {"lse": "no softmax"}, "generation": generation}
    linear = full.model_copy(update=own)
    layers = [full, full.model_copy(update={"layer": 1}), full.model_copy(update={"layer": 2}), linear]
    reply_tables.show(ModelInfo(id="net", created=1, checkpoint="net", state="resident", layers=layers))
    lines = capsys.readouterr().out.splitlines()
    assert [text.split() for text in lines[:3]] == [
        ["layers", "kind", "keys", "heads", "kv", "heads", "head", "dim"],
        ["0–2", "attention", "tokens", "8", "2", "64"],
        ["3", "linear", "tokens", "8", "2", "64"],
    ]
    assert {"taps of 0–2 q, weights", "edits of 3 q", "refused of 3 lse: no softmax"} <= set(lines)
    assert "refused in a generation of 3 q: a state" in lines
    assert not any(text.startswith("layers ") for text in lines[3:])
    assert max(map(len, lines)) <= 80


def test_weights_that_were_dequantized_are_named_beside_the_dtype(capsys):
    model_ran(RAN)
    assert "in float32:" in capsys.readouterr().out
    model_ran(RAN.model_copy(update={"weights": "dequantized from Q4_K_M"}))
    assert "in float32, dequantized from Q4_K_M:" in capsys.readouterr().out
