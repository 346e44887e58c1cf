"""A model some of whose layers have no softmax: the page shows the others, in their own order and with their names."""

import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import numbers

tiny_models = pytest.importorskip("tests.client.tiny_models")
compared = pytest.importorskip("tests.models_walk.compared")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with a small Qwen3.5 with random parameters, whose layer 0 is linear."""
    folder = tmp_path_factory.mktemp("models")
    compared.built("qwen3_5").save_pretrained(folder / "hybrid")
    tiny_models.tokenizer().save_pretrained(folder / "hybrid")
    with live_server(folder) as url:
        yield url


@pytest.mark.parametrize("resident", [False, True])
def test_the_layers_with_a_softmax_are_shown(visit, resident):
    if resident:
        visit.http.post("/v1/models", json={"checkpoint": "hybrid"}).raise_for_status()
    page = visit.open("#/overview?source=model:hybrid&text=the cat sat on the mat&layer=0&head=1")
    page.get_by_role("heading", name="L1H1").wait_for()
    asked = {"text": "the cat sat on the mat", "layers": [1]}
    expected = np.array(visit.http.post("/v1/models/hybrid/weights", json=asked).json()["layers"][0]["weights"])[1]
    np.testing.assert_allclose(numbers(page), expected, rtol=2e-3, atol=1e-6)
    assert visit.violations() == []
