"""``attention vectors`` at a running server, and ``attention generate --steer``."""

import json
import re

import numpy as np
import pytest

from attention_client import Client
from attention_client.cli.commands.generation_commands import _steered
from tests.client.cli.command_line import invoke
from tests.conftest import live_server

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as address:
        yield address


def run(url, *arguments):
    result = invoke(["--url", url, *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_vector_is_fitted_listed_exported_read_again_steers_and_is_removed(url, tmp_path):
    (tmp_path / "up.txt").write_text("the park\nthe garden\n", "utf-8")
    (tmp_path / "down.txt").write_text("the house\nthe school\n", "utf-8")
    output = run(
        url, "vectors", "fit", "tiny", str(tmp_path / "up.txt"), str(tmp_path / "down.txt"), "--position", "mean",
        "--layer", "1", "--layer", "2",
    )  # fmt: skip
    vector = re.search(r"[0-9a-f]{32}", output)[0]
    assert vector in run(url, "vectors", "list", "tiny")
    assert "mean_difference" in run(url, "vectors", "show", vector)
    file = tmp_path / "vector.gguf"
    assert str(file) in run(url, "vectors", "export", vector, str(file)).replace("\n", "")
    again = re.search(r"[0-9a-f]{32}", run(url, "vectors", "fit", "tiny", "--gguf", str(file)))[0]
    with Client(url, timeout=120) as client:
        one, other = (client.vectors.get(each).directions for each in (vector, again))
        assert one.keys() == other.keys() == {"1", "2"}
        np.testing.assert_array_equal(one["1"], other["1"])
    plain, steered = (
        run(url, "generate", "tiny", "Kate went to the", "--max-tokens", "6", "--json", *more)
        for more in ((), ("--steer", f"{vector}=4"))
    )
    assert "town" in plain
    assert "garden" in steered
    run(url, "vectors", "delete", vector)
    assert vector not in run(url, "vectors", "list", "tiny")


def test_a_fit_tells_its_price_and_fits_nothing(url, tmp_path):
    for name, texts in (("up", "the park\nthe garden\n"), ("down", "the house\nthe school of the town\n")):
        (tmp_path / f"{name}.txt").write_text(texts, "utf-8")
    files = [str(tmp_path / "up.txt"), str(tmp_path / "down.txt")]
    asked = ["vectors", "fit", "tiny", *files, "--method", "pca", "--layer", "1", "--price", "--json"]
    price = json.loads(run(url, *asked))
    with Client(url, timeout=120) as client:
        length = client.models.tokenize("tiny", "the school of the town").count
        fit = {"method": "pca", "layers": [1]}
        told = client.models.complexity("tiny", length, batch=4, vector=fit).vector
        assert (price["flops"], price["peak_bytes"]) == (told.flops, told.peak_bytes)
        assert not [each for each in client.vectors.list("tiny").vectors if each.positive == 2 and each.method == "pca"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["vectors", "fit", "tiny"], "--gguf"),
        (["vectors", "fit", "tiny", "--gguf", "a.gguf", "--price"], "stored at once"),
        (["vectors", "fit", "tiny", "gone.txt", "gone.txt"], "no file gone.txt"),
        (["generate", "tiny", "Kate", "--steer", "abc=fast"], "ID=SCALE"),
    ],
)
def test_what_is_not_understood_is_told(arguments, words):
    result = invoke(arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_scale_is_one_by_default():
    assert _steered(["a", "b=-2.5"], "") == [{"vector": "a", "scale": 1.0}, {"vector": "b", "scale": -2.5}]
