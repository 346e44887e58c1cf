"""Fixtures of the tests of answers."""

import copy

import pytest
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tools.models_walk.model_types import built

from attention_service.models.loaded.loaded_model import LoadedModel


@pytest.fixture
def small():
    """Return a function that builds a small model of a type, and loads a copy of it."""
    loaded = []

    def small(kind):
        model = built(kind)
        loaded.append(LoadedModel(kind, copy.deepcopy(model).requires_grad_(False), tokenizer(), device()))
        return model.to(device().torch), loaded[-1]

    yield small
    for each in loaded:
        each.close()
