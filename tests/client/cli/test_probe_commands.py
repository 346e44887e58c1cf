"""``attention models fit-probe`` at a running server; scores and named tokens in lines of ``attention generate``."""

import json
import re

import pytest

from attention_client import Client
from tests.client.cli.command_line import invoke
from tests.conftest import live_server

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
TEXTS = [(name in ("Kate", "Rose"), f"{name} went to the {place}") for name in ("Kate", "Rose", "Tom", "Sam")
         for place in ("park", "town", "school")]  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as address:
        yield address


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "labelled.txt"
    path.write_text("".join(f"{int(label)}\t{text}\n" for label, text in TEXTS), "utf-8")
    return str(path)


def run(url, *arguments):
    result = invoke(["--url", url, *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_probe_is_fitted_scores_tokens_and_ends_a_text(url, file):
    output = run(url, "models", "fit-probe", "tiny", file, "--layer", "1", "--position", "mean", "--folds", "3")
    assert "auc" in output
    probe = re.search(r"[0-9a-f]{32}", output)[0]
    watched = ["generate", "tiny", "Kate went to the", "--max-tokens", "6"]
    reply = json.loads(run(url, *watched, "--watch", probe, "--json"))
    scores = [token["scores"][probe] for token in reply["choices"][0]["attention"]]
    shown = run(url, *watched, "--watch", probe)
    assert re.findall(rf"{probe[:6]} (\S+)", shown) == [f"{score:.3g}" for score in scores]
    lowest = min(scores) - 1
    ended = run(url, *watched, "--watch", f"{probe}={lowest}")
    assert f"ends by the score of probe {probe[:6]}: {scores[0]:.3g} at token 0" in " ".join(ended.split())


def test_statistics_make_a_probe(url, file):
    output = run(
        url, "models", "fit-probe", "tiny", file, "--statistic", "entropy", "--statistic", "first_key", "--head", "0",
        "--folds", "3", "--json",
    )  # fmt: skip
    assert json.loads(output)["of"] == {"statistics": ["entropy", "first_key"], "heads": [0]}


def test_a_fit_tells_its_price_and_fits_nothing(url, file):
    asked = ["models", "fit-probe", "tiny", file, "--point", "mlp", "--position", "all", "--price", "--json"]
    price = json.loads(run(url, *asked))
    with Client(url, timeout=120) as client:
        length = client.models.tokenize("tiny", max((text for _, text in TEXTS), key=len)).count
        fit = {"of": {"point": "mlp", "layer": "all"}, "samples": length}
        told = client.models.complexity("tiny", length, batch=len(TEXTS), probe=fit).probe
        assert (price["flops"], price["peak_bytes"]) == (told.flops, told.peak_bytes)
        assert not [each for each in client.models.probes("tiny").probes if getattr(each.of, "point", "") == "mlp"]


def test_log_probabilities_of_named_tokens_stand_in_the_lines(url):
    asked = ["generate", "tiny", "Kate went to the", "--max-tokens", "2", "--logprob-token", " town"]
    reply = json.loads(run(url, *asked, "--json"))
    numbers = [top[" town"] for top in reply["choices"][0]["logprobs"]["top_logprobs"]]
    assert re.findall(r"log p .*?town (\S+)", run(url, *asked)) == [f"{number:.3g}" for number in numbers]


def test_a_prompt_without_special_tokens_has_one_less(url):
    counts = [
        json.loads(run(url, "generate", "tiny", "Kate", "--max-tokens", "1", "--json", *more))["usage"]["prompt_tokens"]
        for more in ((), ("--no-add-special-tokens",))
    ]
    assert counts[0] == counts[1] + 1


def test_vectors_steer_from_the_answer_on(url):
    """Edits that begin with the answer leave the first token as it is."""
    asked = ["generate", "tiny", "Kate went to the", "--max-tokens", "3", "--json"]
    edit = '{"1": [{"tap": "hidden", "scale": 0}]}'
    plain, whole, later = (
        [token["id"] for token in json.loads(run(url, *asked, *more))["choices"][0]["attention"]]
        for more in ((), ("--edits", edit), ("--edits", edit, "--from", "answer"))
    )
    assert later[0] == plain[0]
    assert later != whole


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["models", "fit-probe", "tiny", "FILE", "--statistic", "entropy", "--point", "mlp"], "--point"),
        (["models", "fit-probe", "tiny", "FILE", "--head", "1"], "--statistic"),
        (["models", "fit-probe", "tiny", "FILE", "--vector", "a", "--point", "mlp"], "--point"),
        (["models", "fit-probe", "tiny", "BAD"], "line 2 of"),
        (["generate", "tiny", "Kate", "--watch", "abc=high"], "ID=SCORE"),
        (["generate", "tiny", "Kate", "--no-look", "--logprob-token", "a"], "--no-look"),
    ],
)
def test_what_does_not_go_together_is_told(arguments, words, file, tmp_path):
    (tmp_path / "bad.txt").write_text("1\tfine\n2\tnot\n", "utf-8")
    named = {"FILE": file, "BAD": str(tmp_path / "bad.txt")}
    result = invoke([named.get(each, each) for each in arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
