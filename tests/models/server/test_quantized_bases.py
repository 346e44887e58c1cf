"""Adapters whose base is quantized: the numbers of peft over the dequantized base, and both named in the reply."""

import numpy as np
import pytest
import torch
from tests.conftest import live_server

from attention_client import Client

pytest.importorskip("peft", reason="peft writes the adapters")
from tests.models import quantized_checkpoints
from tests.models.small_adapters import LLAMA, write_adapter

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
IDS = [5, 3, 7, 8, 6, 4, 9]


def write_gguf(folder):
    """Write a GGUF file alone in a folder, and return the model with the numbers that it stands for."""
    files = pytest.importorskip("tests.models.gguf_files")
    pytest.importorskip("accelerate")
    folder.mkdir()
    model = files.llama()
    files.write(folder / "net.Q8_0.gguf", model, "Q8_0", tokens=True)
    return model


FORMS = {
    "GPTQ int4": lambda folder: quantized_checkpoints.write(folder, "GPTQ int4"),
    "FP8": lambda folder: quantized_checkpoints.write(folder, "FP8"),
    "Q8_0": write_gguf,
}


@pytest.mark.sampled(form=1)
@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_is_added_to_the_dequantized_weights(tmp_path, form):
    base = FORMS[form](tmp_path / "net").float().eval()
    reference = write_adapter(base, tmp_path / "one", base_name="net", **LLAMA)
    with torch.no_grad():
        plain, expected = (each(input_ids=torch.tensor([IDS])).logits[0, -1:] for each in (base, reference))
    assert (plain - expected).abs().max() > 0.01
    with live_server(tmp_path) as url, Client(url, timeout=120) as client:
        listed = {model.id: model for model in client.models.list().data}
        assert listed["net"].adapters == ["one"]
        assert listed["net:one"].refused is None
        for name, logits, weights in (
            ("net:one", expected, f"dequantized from {form} + adapter one"), ("net", plain, f"dequantized from {form}"),
        ):  # fmt: skip
            reply = client.models.forward(name, tokens=IDS, return_=["logits"])
            assert reply.ran.weights == weights
            np.testing.assert_allclose(reply.logits, logits, atol=1e-5)
        beside = client.models.weights("net", tokens=IDS, adapter="one", compare="base")
        assert beside.ran.weights == f"dequantized from {form} + adapter one"
        assert max(float(abs(layer.differences.weights).max()) for layer in beside.layers) > 1e-4
