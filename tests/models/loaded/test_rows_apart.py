"""Rows of one pass never meet in arithmetic: a row whose numbers become infinite changes none of the others."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.models.generation.decoding.test_joined import FAMILIES, TEXT, Callers, alone, loaded, same
from tests.models.small_models import IDS, device

from attention_contract.errors import InvalidCheckpoint, InvalidRequest, NotFinite
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_service.models.answers.joined_questions import group_of, joined_replies
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.loaded.checked_request import read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_loading import load_checkpoint
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.modules.checkpoints.adapter_files import ADAPTER_TENSORS, AdapterFiles

INFINITE = {"1": [{"tap": "output", "scale": 3e38}], "0": [{"tap": "context", "scale": 3e38}]}
"""Edits after which the states of a text are infinite, and then NaN."""
TOLERANCE = 1e-5


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def logits(model, rows):
    ids = torch.tensor([IDS] * len(rows))
    with torch.no_grad(), model.adapters.of_rows(rows):
        output = model.run({"input_ids": ids}, AttentionPass({}))
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.fixture
def small_adapters():
    pytest.importorskip("peft", reason="peft writes the adapters")
    from tests.models import small_adapters

    return small_adapters


@pytest.mark.sampled(kind=5)
@pytest.mark.parametrize(
    "kind", ["lora", "dora", "norms", "embedding", "scaled-embedding", "conv1d", "dora-conv1d", "encoder"]
)
def test_an_adapter_whose_products_overflow_changes_no_row_beside_it(tmp_path, small_adapters, kind):
    family, entries = small_adapters.KINDS[kind]
    base = small_adapters.base_of(kind)
    for seed, name in enumerate(("hot", "mild")):
        small_adapters.write_adapter(base, tmp_path / name, seed=seed, **entries)
    rewritten(tmp_path / "hot", lambda name, x: x * 3e38 / x.abs().max() if "_A" in name else x)
    model = LoadedModel(family, copy.deepcopy(base).requires_grad_(False), tokenizer(), device())
    hot, mild = (model.adapters.load(name, AdapterFiles.open(tmp_path / name)) for name in ("hot", "mild"))
    plain, changed = logits(model, [None])[0], logits(model, [mild])[0]
    found = logits(model, [None, hot, mild, hot, None])
    assert not found[1].isfinite().all()
    for row, expected in ((0, plain), (2, changed), (4, plain)):
        torch.testing.assert_close(found[row], expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(logits(model, [None, mild])[0], plain, atol=TOLERANCE, rtol=TOLERANCE)  # hot is kept


def test_an_infinite_row_of_the_base_stays_infinite_beside_a_dora(tmp_path, small_adapters):
    base = small_adapters.base_of("dora")
    small_adapters.write_adapter(base, tmp_path, **small_adapters.KINDS["dora"][1])
    model = LoadedModel("llama", copy.deepcopy(base).requires_grad_(False), tokenizer(), device())
    dora = model.adapters.load("dora", AdapterFiles.open(tmp_path))
    module = next(iter(dora.changes))
    x = torch.zeros(2, 1, module.in_features)
    x[..., 0] = torch.inf
    with model.adapters.of_rows([None, dora]), torch.no_grad():
        found = module(x)[0, 0]
    assert torch.equal(found, torch.inf * module.weight[:, 0].sign())


def rewritten(folder, change):
    tensors = load_file(folder / ADAPTER_TENSORS)
    save_file({name: change(name, x) for name, x in tensors.items()}, folder / ADAPTER_TENSORS)


@pytest.mark.sampled
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("role", ["lora_A", "lora_B", "magnitude", "lm_head"])
def test_an_adapter_with_a_number_that_is_not_finite_is_refused_by_the_name_of_its_tensor(
    tmp_path, small_adapters, role, number
):
    base = small_adapters.base_of("dora")
    entries = {"use_dora": True, **small_adapters.LLAMA, "modules_to_save": ["lm_head"]}
    small_adapters.write_adapter(base, tmp_path, **entries)
    spoiled = next(name for name in load_file(tmp_path / ADAPTER_TENSORS) if role in name)

    def spoil(name, x):
        if name == spoiled:
            x.view(-1)[-1] = number
        return x

    rewritten(tmp_path, spoil)
    model = LoadedModel("llama", base.requires_grad_(False), tokenizer(), device())
    with pytest.raises(InvalidCheckpoint, match=spoiled.replace(".", r"\.")):
        model.adapters.load("one", AdapterFiles.open(tmp_path))
    with pytest.raises(InvalidCheckpoint, match="not finite"):
        AdapterFiles.open(tmp_path).merged(base.state_dict())


def test_an_adapter_whose_scale_makes_its_numbers_infinite_is_refused(tmp_path, small_adapters):
    base = small_adapters.base_of("lora")
    small_adapters.write_adapter(base, tmp_path, **small_adapters.LLAMA | {"lora_alpha": 1e42})
    model = LoadedModel("llama", base.requires_grad_(False), tokenizer(), device())
    with pytest.raises(InvalidCheckpoint, match="s·B is not finite in float32"):
        model.adapters.load("one", AdapterFiles.open(tmp_path))


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_model_with_a_number_that_is_not_finite_is_refused_by_the_name_of_its_tensor(tmp_path, number):
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = number
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"layers\.1\.mlp\.up_proj\.weight .* not finite in float32"):
        load_checkpoint(tmp_path, None, torch.device("cpu"), lambda _: None)


def test_a_model_whose_numbers_are_too_large_for_a_dtype_is_refused_in_it(tmp_path):
    model = tiny("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    model.save_pretrained(tmp_path)
    load_checkpoint(tmp_path, "float32", torch.device("cpu"), lambda _: None)
    with pytest.raises(InvalidCheckpoint, match=r"model\.norm\.weight .* in float16"):
        load_checkpoint(tmp_path, "float16", torch.device("cpu"), lambda _: None)


# ── edits ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({"tap": "weights", "set": np.nan}, "set"),
        ({"tap": "context", "set": np.inf}, "set"),
        ({"tap": "output", "scale": -np.inf}, "scale"),
        ({"tap": "scores", "scale": -np.inf}, "scale"),
        ({"tap": "scores", "set": np.inf}, "set"),
        ({"tap": "masked_scores", "set": np.nan}, "set"),
        ({"tap": "v", "value": np.array([0, np.nan], "f4")[:, None][1:]}, "value"),
    ],
)
def test_an_edit_that_is_not_finite_is_refused_by_its_field(edit, field):
    model = loaded("llama", max_position_embeddings=256)
    with pytest.raises(InvalidRequest) as refused:
        read_request(model, ModelForwardRequest(tokens=TEXT[:5], edits={"0": [edit]}))
    assert refused.value.param == f"edits.0.0.{field}"


def test_a_score_of_minus_infinity_hides_its_key():
    model = loaded("llama", max_position_embeddings=256)
    edits = {"0": [{"tap": "scores", "keys": [1], "queries": [3], "set": -np.inf}]}
    request = ModelWeightsRequest(tokens=TEXT[:5], edits=edits)
    found = weights_reply(model, request, read_request(model, request)).layers[0].weights
    assert (found[:, 3, 1] == 0).all()
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)


# ── texts of several callers ─────────────────────────────────────────────────────────────────────────────────────────


def infinite(model):
    """The edits of layers that a model has."""
    return {layer: edits for layer, edits in INFINITE.items() if layer in model.places}


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", [each for each, (texts, _) in FAMILIES.items() if texts != "no"])
def test_a_running_text_that_becomes_infinite_changes_no_other(kind):
    """Nor does it after it has left its row to another."""
    model, length = loaded(kind, **FAMILIES[kind][1]), 9 if FAMILIES[kind][0] == "alike" else None
    prompts = {name: TEXT[at : at + (length or 4 + 5 * at)] for at, name in enumerate(("first", "second", "third"))}
    callers = Callers(model)
    callers.ask("first", prompts["first"], max_tokens=9)
    later = {layer: [edit | {"queries": [10]} for edit in edits] for layer, edits in infinite(model).items()}
    callers.ask("hot", TEXT[:9], max_tokens=4, attention={"edits": later})
    callers.ask("second", prompts["second"], max_tokens=9)
    callers.turn()
    callers.turn()
    if length is None:
        callers.ask("third", prompts["third"], max_tokens=6)
    found = callers.end()
    assert isinstance(found["hot"], NotFinite)
    for name, tokens in (("first", 9), ("second", 9), ("third", 6)):
        if name in found:
            same(found[name], alone(model, prompts[name], max_tokens=tokens))


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("ask", [ModelForwardRequest, ModelWeightsRequest])
def test_a_question_whose_states_become_infinite_changes_no_other(kind, ask):
    model = loaded(kind, **FAMILIES[kind][1])
    answer = forward_reply if ask is ModelForwardRequest else weights_reply
    edits = ({}, infinite(model), {}, infinite(model), {})
    requests = [ask(tokens=TEXT[at : at + 7], edits=own) for at, own in enumerate(edits)]
    questions = [(request, read_request(model, request)) for request in requests]
    assert len({group_of(model, *each) for each in questions}) == 1
    for own, reply, question in zip(edits, joined_replies(model, questions), questions, strict=True):
        if own:
            continue
        expected = answer(model, *question)
        if ask is ModelForwardRequest:
            pairs = [(each.top, other.top) for each, other in zip(reply.predictions, expected.predictions, strict=True)]
            for each, other in pairs:
                np.testing.assert_allclose([x.logit for x in each], [x.logit for x in other], atol=TOLERANCE)
        else:
            for each, other in zip(reply.layers, expected.layers, strict=True):
                np.testing.assert_allclose(each.weights, other.weights, atol=TOLERANCE)
