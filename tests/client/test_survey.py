"""Surveys of a model's heads, against single requests and against transformers' own eager attention in float64."""

import json
import re
import threading
from base64 import b64decode
from collections import Counter

import numpy as np
import pytest
import torch
from training.tiny_text import corpus
from training.train_tiny_model import FOLDER
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention_client import AsyncClient, Client, InvalidRequest
from attention_client.calls.method import run as run_flow
from attention_client.survey import SurveyedHead, shipped_texts
from attention_client.survey.head_survey import SURVEYED, HeadSurvey
from attention_client.survey.headvis_files import exported
from tests.client.cli.command_line import invoke
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny as small
from tests.conftest import live_server
from tests.weight_loops import of_pairs, received

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns, if another test of this process imported it
TEXTS = ["one, two, three. one, two, three.", *shipped_texts()[:23], "the cat sat on the mat"]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
NEAR = {"rtol": 1e-5, "atol": 1e-6}
"""transformers takes its softmax in float32, whatever the dtype of the model."""
HEADS = [SurveyedHead(layer, head) for layer in range(4) for head in range(4)]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as url:
        yield url


@pytest.fixture(scope="module")
def models(url):
    """A client of a server whose model ``exact`` is tiny in float64."""
    with Client(url, timeout=120) as client:
        client.models.load("tiny", name="exact", dtype="float64")
        yield client.models


@pytest.fixture(scope="module")
def survey(models):
    return models.survey("exact", TEXTS, batch=4)


@pytest.fixture(scope="module")
def eager():
    """Each text's token ids, and its weights ``[heads of all layers, L, L]`` by transformers."""
    words = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        FOLDER, local_files_only=True, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    found = []
    for text in TEXTS:
        ids = torch.tensor([words(text).input_ids])
        with torch.no_grad():
            found.append((ids[0].numpy(), torch.cat(model(ids, output_attentions=True).attentions, 1)[0].numpy()))
    return found


def by_loops(name, ids, weights):
    """One statistic of one head in one text, written out."""
    rows = []
    for query, row in enumerate(weights):
        if name == "entropy":
            rows.append(-sum(w * np.log(w) for w in row[: query + 1] if w > 0))
        elif name == "previous_token":
            rows.append(row[query - 1] if query else 0.0)
        else:
            rows.append(sum(row[key + 1] for key in range(query) if ids[key] == ids[query]))
    return np.mean(rows)


@pytest.mark.slow
def test_every_statistic_is_that_of_single_requests_and_a_distribution_is_of_them(models, survey):
    assert list(survey.heads) == HEADS
    assert list(survey.values) == SURVEYED
    single = [models.weights("exact", text, statistics=[*survey.values], return_weights=False) for text in TEXTS]
    for name, values in survey.values.items():
        expected = np.array(
            [np.concatenate([getattr(layer.statistics, name) for layer in each.layers]) for each in single]
        )
        np.testing.assert_allclose(values, expected, **CLOSE)
        found = survey.distribution(1, 0, name, bins=7)
        own = expected[:, 4]
        np.testing.assert_allclose([found.mean, found.deviation], [own.mean(), own.std()], **CLOSE)
        np.testing.assert_allclose(found.quantiles, np.percentile(own, [0, 25, 50, 75, 100]), **CLOSE)
        assert sum(found.counts) == len(TEXTS)
        assert len(found.edges) == 8


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", ["entropy", "previous_token", "induction"])
def test_the_strongest_passages_are_those_of_a_search_through_eager_weights(survey, eager, name):
    expected = np.array([[by_loops(name, ids, head) for head in weights] for ids, weights in eager])
    np.testing.assert_allclose(survey.of(name), expected, **NEAR)
    for at, (layer, head) in enumerate(HEADS):
        found = survey.strongest(layer, head, name, 4)
        np.testing.assert_allclose(expected[found, at], np.sort(expected[:, at])[: -1 - 4 : -1], **NEAR)
    assert survey.ranked(name)[0] == HEADS[int(expected.mean(0).argmax())]


def test_the_known_heads_of_the_model_that_ships_come_first(survey):
    assert survey.ranked("induction")[0] == (1, 0)
    assert survey.ranked("previous_token")[0] == (0, 0)


@pytest.mark.slow
def test_passages_have_the_weights_of_the_head(models, survey, eager):
    passages = models.passages(survey, 1, 0, by="induction", count=3)
    assert [each.text for each in passages] == survey.strongest(1, 0, "induction", 3)
    for each in passages:
        np.testing.assert_allclose(each.reply.layers[0].weights[0], eager[each.text][1][4], **NEAR)
        assert each.value == survey.of("induction")[each.text, 4]
        assert b"<svg" in each.reply.plot(view="lines").data


def test_edits_hold_in_every_text_and_passage(models, survey):
    edits = {"0": [{"tap": "context", "heads": [0], "set": 0}]}  # the previous-token head that induction needs
    without = models.survey("exact", TEXTS, statistics=["induction"], edits=edits, layers=[1])
    assert without.means("induction")[0] < 0.5 * survey.means("induction")[4]
    (passage,) = models.passages(without, 1, 0, count=1)
    own = models.weights("exact", TEXTS[passage.text], edits=edits, layers=[1], select={"heads": [0]})
    np.testing.assert_array_equal(passage.reply.layers[0].weights, own.layers[0].weights)


async def test_the_awaited_client_finds_the_same(url, survey):
    async with AsyncClient(url, timeout=120) as client:
        found = await client.models.survey("exact", TEXTS, statistics=["induction"], batch=4)
        (passage,) = await client.models.passages(found, 1, 0, count=1)
    np.testing.assert_array_equal(found.of("induction"), survey.of("induction"))
    assert passage.text == survey.strongest(1, 0, "induction", 1)[0]


@pytest.mark.slow
def test_other_requests_run_between_its_batches(url, models):
    seen = []
    thread = threading.Thread(
        target=models.survey,
        args=("exact", TEXTS * 8),
        kwargs={"batch": 1, "statistics": ["entropy"], "on_texts": lambda done, _: seen.append(done)},
    )
    thread.start()
    try:
        with Client(url, timeout=60) as other:
            while not seen:
                pass
            other.models.forward("exact", "the cat")
            answered_at = len(seen)
    finally:
        thread.join()
    assert answered_at < len(seen) == len(TEXTS) * 8


@pytest.mark.parametrize(
    ("param", "given"),
    [
        ("texts", {"texts": []}),
        ("texts", {"texts": "one text"}),
        ("texts.1", {"texts": ["the cat", "mat " * 600, "a mat that is longer"]}),
        ("texts.0", {"texts": [""]}),
        ("batch", {"texts": TEXTS, "batch": 0}),
        ("batch", {"texts": TEXTS, "batch": 257}),
        ("statistics", {"texts": TEXTS, "statistics": ["classes"]}),
        ("statistics", {"texts": TEXTS, "statistics": []}),
        ("layers.0", {"texts": TEXTS, "layers": [9]}),
        ("statistic_options.pairs", {"texts": TEXTS, "statistics": ["pairs"]}),
        ("statistic_options.pairs", {"texts": TEXTS, "statistic_options": {"pairs": [[[0, 0]]]}}),
        (
            "statistic_options.pairs.1.0.1",
            {
                "texts": ["the cat sat", "a"],
                "statistics": ["pairs"],
                "statistic_options": {"pairs": [[[0, 0]], [[0, 99]]]},
            },
        ),
    ],
)
def test_what_cannot_be_surveyed_is_refused_by_its_name(models, param, given):
    with pytest.raises(InvalidRequest) as fault:
        models.survey("exact", **given)
    assert fault.value.param == param


def test_pairs_and_received_weights_of_texts_are_those_of_loops(models, eager):
    pairs = [[[len(ids) - 1, 0], [len(ids) - 1, at % len(ids)]] for at, (ids, _) in enumerate(eager)]
    candidates = [[0, at % len(ids)] for at, (ids, _) in enumerate(eager)]
    options = {"pairs": pairs, "candidates": candidates}
    found = models.survey("exact", TEXTS, statistics=["pairs", "received"], statistic_options=options, batch=3)
    for text, (ids, weights) in enumerate(eager):
        visible = np.tril(np.ones((len(ids), len(ids)), bool))
        for at, head in enumerate(weights.astype(np.float64)):
            assert found.of("received")[text, at] == pytest.approx(received(head, visible).max(), abs=1e-5)
            for name, value in of_pairs(head, pairs[text], candidates[text]).items():
                assert found.of(f"pairs.{name}")[text, at] == pytest.approx(value, abs=1e-5), name
    assert found.ranked("pairs.share")[0] == HEADS[int(found.of("pairs.share").mean(0).argmax())]
    one = models.survey("exact", TEXTS, statistics=["pairs"], statistic_options={"pairs": [[1, 0]]}, batch=4)
    np.testing.assert_allclose(
        one.of("pairs.share"), [[head[1, 0] for head in weights] for _, weights in eager], **NEAR
    )


@pytest.mark.parametrize("ask", [lambda s: s.of("loudness"), lambda s: s.index(4, 0), lambda s: s.index(0, -1)])
def test_a_survey_names_what_it_does_not_have(survey, ask):
    with pytest.raises(InvalidRequest, match="the survey has no"):
        ask(survey)


def test_texts_without_a_number_are_left_out():
    values = {"entropy": np.array([[np.nan, np.nan], [1.0, np.nan], [3.0, np.nan]])}
    survey = HeadSurvey("net", ["a", "b", "c"], [SurveyedHead("decoder.0", 0), SurveyedHead("decoder.0", 1)], values)
    np.testing.assert_array_equal(survey.means("entropy"), [2, np.nan])
    assert survey.strongest("decoder.0", 0, "entropy") == [2, 1]
    assert survey.strongest("decoder.0", 1, "entropy") == []
    assert survey.distribution("decoder.0", 0, "entropy").mean == 2
    assert np.isnan(survey.distribution("decoder.0", 1, "entropy").mean)
    assert str(survey.ranked("entropy")[0]) == "decoder.0 H0"


# ── HeadVis ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def data(models, survey, tmp_path_factory):
    return models.export_headvis(survey, tmp_path_factory.mktemp("headvis") / "data", intervals=5, samples=3)


def read(path):
    return json.loads(path.read_text())


@pytest.mark.slow
def test_its_config_and_its_scatter_name_every_head_and_every_metric(data, survey):
    config, rows = read(data / "config.json"), read(data / "scatter_data.json")
    assert config["heads"] == [list(each) for each in HEADS] == [[row["layer"], row["head"]] for row in rows]
    assert (config["n_layers"], config["n_heads"], config["n_intervals"]) == (4, 4, 5)
    assert {"induction_score", "self_attention_score", "prev_token_score", "pattern_entropy", "qk_distance"} <= {
        *config["metrics"]
    }
    assert config["metric_descriptions"].keys() == {*config["metrics"]} == rows[0].keys() - {"layer", "head"}
    assert not config["has_umap"]
    # What load-head-metrics.py and load-head-sequences.py of Neuronpedia need of a run.
    facts = ("dataset_name", "n_sequences", "seq_len", "dtype", "attn_implementation", "model_name")
    assert [type(config[name]) for name in facts] == [str, int, int, str, str, str]
    assert (config["n_sequences"], config["dtype"]) == (len(TEXTS), "float64")
    assert read(data / "server_config.json") == read(data / "attributions/manifest.json") == {}
    for at, row in enumerate(rows):
        assert row["induction_score"] == pytest.approx(survey.means("induction")[at], abs=1e-6)
    for kind in ("custom_plots", "custom_tables"):
        for each in config[kind]:
            assert read(data / "heads/L0H0.json")[each["key"]]


def test_its_sequences_are_the_largest_eager_weights_in_equal_groups(data, eager):
    largest = np.array([weights[:, 1:, 1:].max((1, 2)) for _, weights in eager])
    for at, (layer, head) in enumerate(HEADS):
        content = read(data / f"heads/L{layer}H{head}.json")
        groups = {}
        for each in content["sequences"]:
            ids, weights = eager[each["sequence_id"]]
            assert each["seq_len"] == len(each["tokens"]) == len(ids)
            assert each["max_activation"] == pytest.approx(largest[each["sequence_id"], at], abs=1e-4)
            groups.setdefault(each["interval"], []).append(each["max_activation"])
            expected = {}
            for query, row in enumerate(weights[at]):
                for key in np.argsort(-row)[:8]:
                    if row[key] >= 0.005:
                        expected[query * len(ids) + key] = row[key]
            assert each["attention_indices"] == sorted(expected)
            np.testing.assert_allclose(
                each["attention_values"], [expected[place] for place in sorted(expected)], atol=6e-5
            )
        assert sorted(groups) == [1, 2, 3, 4, 5]
        assert {len(each) for each in groups.values()} == {3}
        assert all(max(groups[low]) <= min(groups[low + 1]) + 1e-4 for low in range(1, 5))
        np.testing.assert_allclose(sorted(groups[5]), np.sort(largest[:, at])[-3:], atol=1e-4)
        assert sum(content["histogram"]["bin_values"]) == len(TEXTS)
        assert content["statistics"]["mean_max_activation"] == pytest.approx(largest[:, at].mean(), abs=1e-6)
        total = sum(sum(each["attention_values"]) for each in content["sequences"])
        distances = content["qk_distance_histogram"]
        assert sum(distances["bin_values"]) == pytest.approx(total, abs=1e-2)
        assert len(distances["bin_edges"]) == len(distances["bin_values"]) + 1
        mass = Counter()
        for each in content["sequences"]:
            for place, weight in zip(each["attention_indices"], each["attention_values"], strict=True):
                mass[each["tokens"][place % each["seq_len"]]] += weight / total
        shares = {each["token"]: each["weight"] for each in content["top_key_tokens"]}
        assert [*shares.values()] == pytest.approx([weight for _, weight in mass.most_common(50)], abs=1e-4)
        assert all(mass[token] == pytest.approx(share, abs=1e-4) for token, share in shares.items())


@pytest.mark.slow  # a model process of its own
def test_stacks_have_their_own_tokens_and_one_of_them_is_exported(tmp_path):
    small("t5").save_pretrained(tmp_path / "t5")
    tokenizer().save_pretrained(tmp_path / "t5")
    texts = ["the cat sat on the mat", "the cat", "the mat sat"]
    with live_server(tmp_path) as url, Client(url, timeout=120) as client:
        survey = client.models.survey("t5", texts)
        crossing = client.models.passages(survey, "cross.0", 1, by="entropy", count=3)
        decoded = client.models.survey("t5", texts, layers=["cross.0"])
        folder = client.models.export_headvis(survey, tmp_path / "data")
        with pytest.raises(InvalidRequest, match="attend from one to another"):
            client.models.export_headvis(decoded, tmp_path / "none")
    assert {each.text: each.reply.layers[0].weights.shape for each in crossing} == {
        text: (1, 1, len(words.split())) for text, words in enumerate(texts)
    }
    assert read(folder / "config.json")["layer_names"] == {"0": "encoder.0", "1": "encoder.1"}
    for path in (folder / "heads").iterdir():
        for each in read(path)["sequences"]:
            assert each["tokens"] == texts[each["sequence_id"]].split()
            assert max(each["attention_indices"]) < each["seq_len"] ** 2


@pytest.mark.parametrize("given", [{"intervals": 0}, {"samples": 0}, {"top_k": 1}])
def test_an_export_that_cannot_be_is_refused(models, survey, tmp_path, given):
    with pytest.raises(InvalidRequest) as fault:
        models.export_headvis(survey, tmp_path / "data", **given)
    assert fault.value.param in given
    assert not (tmp_path / "data").exists()


def test_an_export_asks_for_each_text_once(models, survey, tmp_path):
    texts, done = [], []

    def send(call):
        texts.append(call.request.text)
        return models.send(call)

    run_flow(exported(survey, tmp_path, (5, 3, 8), 0.005, lambda *progress: done.append(progress), {}), send)
    assert texts == TEXTS
    assert done == [(number, len(TEXTS)) for number in range(1, len(TEXTS) + 1)]


# ── the texts that ship, and the command ─────────────────────────────────────────────────────────────────────────────


def test_the_texts_that_ship_are_those_that_the_grammar_writes():
    assert shipped_texts() == corpus().splitlines()
    assert 250 < len(set(shipped_texts())) == len(shipped_texts())


def run(url, *arguments, stdin=None):
    """Return what the command prints, without the log of the server, which runs in this process."""
    result = invoke(["--url", url, "heads", *arguments], input=stdin)
    assert result.exit_code == 0, result.output
    return "".join(line for line in result.stdout.splitlines(keepends=True) if "[info" not in line)


@pytest.mark.slow
def test_the_command_orders_the_heads_and_shows_the_passages_of_the_first(url, models, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS))
    out = run(url, "exact", str(file), "--and", "previous_token", "--headvis", str(tmp_path / "data"))
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["head", "induction"]
    assert lines[0].rstrip().endswith("previous token")
    assert lines[1].split()[0] == "L1H0"
    assert "L1H0, induction 0." in out
    assert f"exact over {len(TEXTS)} texts" in out
    assert len([*(tmp_path / "data/heads").iterdir()]) == 16


def test_the_command_draws_the_heads_of_all_layers(url, models, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "texts.txt"
    file.write_text("one, two. one, two.\nthe cat sat\n")
    picture = tmp_path / "heads.svg"
    out = run(url, "exact", str(file), "--and", "entropy", "--plot", str(picture), "--width-mm", "85")
    assert out == f"{picture}: {picture.stat().st_size} bytes\n"
    svg = picture.read_text("utf-8")
    assert {"exact · mean over 2 texts", "induction", "entropy, nats", "L0", "L3", "H3"} <= set(
        re.findall(r">([^<>]+)</text>", svg)
    )
    assert float(re.search(r'width="([\d.]+)pt"', svg)[1]) * 25.4 / 72 == pytest.approx(85, abs=0.1)
    run(url, "exact", str(file), "--plot", str(tmp_path / "heads.html"))
    assert "induction" in (tmp_path / "heads.html").read_text("utf-8")
    for wrong in (["--show", "L0H0"], ["--json"]):
        refused = invoke(["--url", url, "heads", "exact", str(file), "--plot", str(picture), *wrong])
        assert refused.exit_code == 2, refused.output


def test_a_survey_is_drawn_by_its_means(survey):
    pytest.importorskip("matplotlib")
    from attention_contract.schemas.picture_options import PictureOptions
    from attention_pictures.reply_figures import layers_figure
    from tests.pictures.test_layout import faults

    options = PictureOptions(width_mm=85)
    figure = layers_figure(survey._by_layer(["induction", "signed_distance"]), None, options, "all heads")
    assert faults(figure) == []
    drawn = np.asarray(figure.axes[0].collections[0].get_array())
    np.testing.assert_allclose(drawn.ravel(), survey.means("induction"))
    less = figure.axes[2].collections[0]
    assert less.norm.vmin == -less.norm.vmax, "negative numbers diverge from 0"
    assert b"all" in survey.plot(statistics=["entropy"], title="all").data
    with pytest.raises(InvalidRequest):
        survey.plot(statistics=["unknown"])
    with pytest.raises(InvalidRequest):
        survey.plot(view="lines")


@pytest.mark.slow
def test_the_command_takes_the_texts_that_ship_without_a_file(url, models):
    assert f"exact over {len(shipped_texts())} texts" in run(url, "exact", "--count", "0", "--layer", "1")


def test_the_command_reads_a_file_and_tells_a_program_everything(url, models, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("one, two. one, two.\n\nthe cat\n")
    reply = json.loads(run(url, "exact", str(file), "--json"))
    assert reply["texts"] == ["one, two. one, two.", "the cat"]
    assert [(each["layer"], each["head"]) for each in reply["heads"]] == HEADS
    assert reply["heads"][4]["statistics"]["induction"]["strongest"] == [0, 1]
    piped = run(url, "exact", "-", "--by", "entropy", "--show", "L0H1", "--layer", "0", stdin="the cat\nthe dog\n")
    assert "L0H1, entropy" in piped
    assert "exact over 2 texts" in piped


def test_the_command_reads_pairs_and_orders_heads_by_them(url, models, tmp_path):
    texts, pairs, form = (tmp_path / name for name in ("texts.txt", "pairs.json", "form.json"))
    texts.write_text("one, two. one, two.\nthe cat\n")
    pairs.write_text('{"pairs": [[[3, 2]], [[1, 0], [1, 1]]], "candidates": [[0, 2], [0, 1]]}')
    printed = run(url, "exact", str(texts), "--pairs", str(pairs), "--and", "received", "--count", "0")
    assert printed.split()[:2] == ["head", "pairs.first"]
    reply = json.loads(run(url, "exact", str(texts), "--pairs", str(pairs), "--json"))
    expected = models.survey(
        "exact", reply["texts"], statistics=["pairs"], statistic_options=json.loads(pairs.read_text())
    )
    for at, each in enumerate(reply["heads"]):
        assert each["statistics"]["pairs.share"]["mean"] == pytest.approx(expected.means("pairs.share")[at])
    form.write_text('{"pair": []}')
    for options in (["--pairs", str(form)], ["--by", "pairs.share"]):
        with pytest.raises(AssertionError, match="pairs"):
            run(url, "exact", str(texts), *options)


def test_the_command_reads_needles_from_lines_of_json(url, models, tmp_path):
    file = tmp_path / "needles.jsonl"
    needle = "Vubupe, Soduri, Napi."
    lines = [
        {"text": f"The cat sat. {needle} Vubupe,", "needle": needle},
        {"text": f"{needle} Tom sat. Vu", "needle": needle},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    options = json.dumps({"passages": {"names": needle}})
    out = run(url, "exact", str(file), "--by", "retrieval", "--and", "classes.names", "--statistic-options", options)
    assert out.splitlines()[0].split()[:2] == ["head", "retrieval"]
    assert out.splitlines()[0].rstrip().endswith("classes.names")
    assert out.splitlines()[1].split()[0] == "L1H0"
    file.write_text(json.dumps({"needle": "the"}))
    result = invoke(["--url", url, "heads", "exact", str(file)])
    assert result.exit_code == 2
    assert "line 1 of" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "stdin", "detail"),
    [
        (["nowhere.txt"], None, "there is no file"),
        (["-"], "\n \n", "has no text"),
        (["--by", "loudness"], None, "is not one of"),
        (["--show", "three"], None, "expected the name of a head, as L1H3"),
    ],
)
def test_the_command_names_what_is_wrong(url, arguments, stdin, detail):
    result = invoke(["--url", url, "heads", "exact", *arguments], input=stdin)
    assert result.exit_code == 2
    assert detail in " ".join(result.output.replace("│", " ").split())


def test_a_notebook_shows_every_statistic_by_layer_and_head(survey):
    shown = survey._repr_html_()
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', shown, re.S).group(1))
    values = np.frombuffer(b64decode(data["values"]), "<f4").reshape(data["shape"])
    assert data["names"] == list(survey.values)
    for name, table in zip(data["names"], values, strict=True):
        np.testing.assert_allclose(table.ravel(), survey.means(name), rtol=1e-6)
    assert len(repr(survey)) < 410
