"""A detector on the page: what an object looks at lies over the places of the image."""

import httpx
import numpy as np
import pytest

from attention_client import Client
from tests.conftest import live_server

small_encoders = pytest.importorskip("tests.models.inputs.images.small_encoders")
detectors = pytest.importorskip("tests.models.inputs.images.small_detectors")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with a DETR with random parameters, resident."""
    folder = tmp_path_factory.mktemp("models")
    for part in (detectors.eager("detr"), detectors.processor()):
        part.save_pretrained(folder / "detector")
    with live_server(folder) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "detector"}, timeout=120).raise_for_status()
        yield url


def test_the_places_that_an_object_looks_at_lie_over_the_image(visit):
    png = small_encoders.png(small_encoders.noise(64))
    with Client(str(visit.http.base_url), timeout=120) as client:
        reply = client.models.weights("detector", images=[png], layers=["cross.1"])
    weights = reply.layers[0].weights[2]
    page = visit.open("#/overview?source=model:detector&layer=5&head=2")
    page.set_input_files("input[type=file]", {"name": "64.png", "mimeType": "image/png", "buffer": png})
    canvas, readout = page.locator(".patches canvas"), page.locator(".patches .readout")
    readout.filter(has_text="1.00 of the weights of object 0 lie on the image").wait_for(timeout=60_000)
    page.get_by_label("Looking").select_option("3")
    readout.filter(has_text="of the weights of object 3").wait_for()
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] / 16})  # a place of the first row
    readout.filter(has_text="object 3 looks at [0,4]: ").wait_for()  # no place is an object
    shown = readout.inner_text().split(": ")[1].replace("−", "-")
    np.testing.assert_allclose(float(shown), weights[3, 4], rtol=1e-3)
    assert visit.violations() == []
