"""A new form of checkpoint is one function: its folder is listed, its layers are imported, and it is loaded whole."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.client.transformers.families import tiny

from attention_contract.schemas.modules import ImportModule
from attention_service.models.folders import checkpoint_facts
from attention_service.models.folders.model_catalogue import find_folder, listed
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.modules.checkpoints import checkpoint_files
from attention_service.modules.checkpoints.catalogue import described
from attention_service.modules.checkpoints.forms import FORMS
from attention_service.modules.checkpoints.forms.form import Facts, Form, FormReader, Part
from attention_service.modules.checkpoints.import_plan import plan

MARK = "halved.json"


def is_halved(folder):
    return (folder / MARK).is_file()


def halved(stored):
    """Every tensor is there as its half, under a name that begins with ``half.``; others are left out."""
    if not is_halved(stored.place):
        return None
    config = json.loads((stored.place / MARK).read_text()) | {"transformers_weights": "halved.safetensors"}
    tensors = {
        name.removeprefix("half."): Part((name,), lambda x: x * 2) for name in stored.names if name.startswith("half.")
    }
    others = tuple(sorted(name for name in stored.names if not name.startswith("half.")))
    return Form(Facts(config, library="halves"), tensors, others)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The model that a folder of the form stands for."""
    forms = (FormReader(halved, is_halved), *FORMS)
    monkeypatch.setattr(checkpoint_files, "FORMS", forms)
    monkeypatch.setattr(checkpoint_facts, "FORMS", forms)
    made = tiny("llama")
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / MARK).write_text(json.dumps(made.config.to_dict() | {"architectures": [type(made).__name__]}))
    halves = {f"half.{name}": (x / 2).detach() for name, x in made.named_parameters()}
    save_file(halves | {"odd": torch.ones(2)}, tmp_path / "net" / "halved.safetensors")
    return made


def test_it_is_listed_imported_and_loaded(model, tmp_path):
    (row,) = (each for each in listed(tmp_path) if each.checkpoint == "net")
    assert (row.refused, row.stored, row.left_out) == (None, "float32 of halves", ["odd"])
    assert {each.problem for each in described(tmp_path, "net").attentions} == {None}
    name = "model.layers.1.self_attn.q_proj.weight"
    layer = plan(tmp_path, ImportModule(checkpoint="net", layer=1)).read()
    assert torch.equal(layer["q_proj.weight"], model.state_dict()[name])
    folder = find_folder(tmp_path, "net").folder
    loaded = LoadedModel.load(folder, dtype="float32", device=torch.device("cpu"), progress=lambda _: None)
    assert (loaded.weights, loaded.left_out) == ("float32 of halves", ["odd"])
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
