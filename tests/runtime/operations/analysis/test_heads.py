"""Heads are read in parts from a request and from a recording alike, and errors name the field that chose them."""

import numpy as np
import pytest
import torch

from attention_contract.errors import InternalError, InvalidRequest, InvalidTensor, RecordingNotFound
from attention_contract.schemas.recordings import EXAMPLE_RECORDING, RecordingFile, RecordingQuery
from attention_service.core.inspection.head_reader import UnfitNumbers
from attention_service.modules.recording_store import RecordingStore
from attention_service.runtime.operations.analysis.heads import RecordedHeads, SentHeads

CPU = torch.device("cpu")


@pytest.fixture
def weights(rng):
    return rng.dirichlet(np.ones(5), (3, 5)).astype(np.float32)


@pytest.fixture
def recorded(tmp_path, weights):
    store = RecordingStore(tmp_path, 2**20)
    heads = [{"name": "layers.0", "heads": ["L0H0"]}, {"name": "layers.1", "heads": ["L1H0", "L1H1"]}]
    layers = {"0.weights": weights[:1], "1.weights": weights[1:]}
    facts = {"tokens": {"layers": ["x"] * 5}, "attentions": heads, "layers": layers}
    info = store.add(RecordingFile.model_validate(EXAMPLE_RECORDING | facts))
    found = store.get(info.id, RecordingQuery()).placed("weights")
    return RecordedHeads(store, info.id, None, [found["layers.0"], found["layers.1"]], "layers")


def test_recorded_and_sent_heads_are_read_alike(recorded, weights):
    for heads in (recorded, SentHeads(weights, ("weights",))):
        assert (heads.widths, heads.rows) == ((5, 5, 5), 5)
        with heads.opened(CPU) as reader:
            part = reader.read(range(0, 2), range(1, 4))
        assert part.dtype == torch.float64
        np.testing.assert_array_equal(part, weights[0:2, 1:4])


def test_refused_numbers_name_the_field(recorded, weights):
    with pytest.raises(InvalidTensor, match=r"^a, b: expected") as sent, SentHeads(weights, ("a", "b")).opened(CPU):
        raise UnfitNumbers("expected others")
    assert sent.value.param == "a"
    text = r"^layers: expected others in the recorded weights$"
    with pytest.raises(InvalidRequest, match=text) as caught, recorded.opened(CPU):
        raise UnfitNumbers("expected others")
    assert caught.value.param == "layers"


def test_a_damaged_recording_is_distinguished_from_a_deleted_one(recorded):
    path = recorded.store.path(recorded.recording)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InternalError, match="cannot be read"), recorded.opened(CPU):
        pass
    recorded.store.delete(recorded.recording)
    with pytest.raises(RecordingNotFound), recorded.opened(CPU):
        pass
