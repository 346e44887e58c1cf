"""The Jacobians of a fitted lens are those of plain autograd over transformers' own models in float64."""

import copy

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.models.small_models import IDS, device, near

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import JacobianRequest, ModelLensRequest
from attention_service.models.answers.lenses.jacobian_rows import jacobian_rows, plan_rows
from attention_service.models.answers.lenses.lens_file import LensFile
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.stream_search import find_stream

TEXT = "the cat sat on the mat the dog"
LENS = "0" * 32


def served(family):
    original = tiny(family).requires_grad_(False)
    model = LoadedModel(family, copy.deepcopy(original), tokenizer(), device())
    return original, model, find_stream(model)


def rows_of(model, stream, start=0, text=TEXT, **fields):
    request = JacobianRequest(**{"text": text, "skip_first": 2, "max_tokens": 7, "start": start} | fields)
    plan = plan_rows(model, request, stream, ModelCosts(model), 2**30)
    return jacobian_rows(model, plan, stream)


def by_hand(original, family, ids, skip):
    """The Jacobian of one text ``[layers − 1, d, d]``, entry by entry of the last states."""
    model = copy.deepcopy(original).double()
    layers, states = (model.transformer.h if family == "gpt2" else model.model.layers), {}

    def hook(layer, _, output):
        state = output[0] if isinstance(output, tuple) else output
        states[layer] = state.detach().requires_grad_() if layer is layers[0] else state
        return (states[layer], *output[1:]) if isinstance(output, tuple) else states[layer]

    for layer in layers:
        layer.register_forward_hook(hook)
    model(torch.tensor([ids]))
    last, tokens = states[layers[-1]][0], range(skip, len(ids) - 1)
    found = []
    for layer in layers[:-1]:
        total = torch.zeros(last.shape[-1], last.shape[-1], dtype=torch.float64)
        for entry in range(last.shape[-1]):
            for later in tokens:
                (gradient,) = torch.autograd.grad(last[later, entry], states[layer], retain_graph=True)
                total[entry] += gradient[0, list(tokens)].sum(0)
        found.append(total / len(tokens))
    return torch.stack(found)


@pytest.mark.sampled(family=1)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_the_rows_are_the_mean_over_tokens_of_the_summed_jacobians(family):
    original, model, stream = served(family)
    ids = model.reader.read(ModelLensRequest(text=TEXT)).text.ids[0, :7].tolist()
    reply = rows_of(model, stream)
    near(reply.rows, by_hand(original, family, ids, 2), 1e-5)
    assert reply.width == 32
    rest = rows_of(model, stream, start=30)
    near(rest.rows, reply.rows[:, 30:])


def test_a_lens_moves_the_states_before_they_are_read(tmp_path):
    original, model, stream = served("gpt2")
    matrix = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    save_file({"jacobians.0": matrix}, tmp_path / "lens.safetensors")
    request = ModelLensRequest(tokens=IDS, kind="jacobian", lens=LENS, of=["hidden", "output", "heads"], targets=[3])
    reply = LensRun(model, plan_lens(model, request, stream, LensFile(tmp_path / "lens.safetensors"))).reply()
    double = copy.deepcopy(original).double()
    states = double(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    moved = states[1][0] @ torch.from_numpy(matrix).double().T
    near(reply.layers[0].hidden.targets, double.lm_head(double.transformer.ln_f(moved))[:, [3]], 1e-4)
    near(reply.layers[1].hidden.targets, double(torch.tensor([IDS])).logits[0][:, [3]], 1e-4)
    heads = reply.layers[0].heads.targets.sum(0)
    near(heads, reply.layers[0].output.targets, 1e-4)  # the projection has no bias yet
    assert reply.rest is None


def test_a_lens_of_another_model_is_refused(tmp_path):
    _, model, stream = served("gpt2")
    save_file({"jacobians.0": np.eye(8, dtype=np.float32)}, tmp_path / "lens.safetensors")
    with pytest.raises(InvalidRequest, match=r"expected a matrix \[32, 32\] for layer 0") as caught:
        plan_lens(
            model,
            ModelLensRequest(tokens=IDS, kind="jacobian", lens=LENS),
            stream,
            LensFile(tmp_path / "lens.safetensors"),
        )
    assert caught.value.param == "lens"


def test_texts_that_are_too_short_are_refused():
    _, model, stream = served("gpt2")
    with pytest.raises(InvalidRequest, match="at least 4 tokens") as caught:
        rows_of(model, stream, text="the cat")
    assert caught.value.param == "text"


@pytest.mark.slow
def test_lens_contributions_and_jacobians_are_those_of_transformer_lens(tmp_path):
    """Version 4.3 of that library, where it is installed."""
    bridge = pytest.importorskip("transformer_lens.model_bridge")
    analysis = pytest.importorskip("transformer_lens.tools.analysis")
    for family in ("gpt2", "llama"):
        original, model, stream = served(family)
        original.save_pretrained(tmp_path / family)
        tokenizer().save_pretrained(tmp_path / family)
        theirs = bridge.TransformerBridge.boot_transformers(str(tmp_path / family), device="cpu")
        ids = model.reader.read(ModelLensRequest(text=TEXT)).text.ids[0].tolist()
        tokens, targets = torch.tensor([ids]), [3, 5, 7]
        request = ModelLensRequest(tokens=ids, of=["hidden", "heads"], targets=targets, top_k=0)
        ours = LensRun(model, plan_lens(model, request, stream)).reply()
        expected = analysis.logit_lens(theirs, tokens, positions=None, targets=targets)
        for number, layer in enumerate(ours.layers):
            label = "final_post" if number == len(ours.layers) - 1 else f"{number + 1}_pre"
            near(layer.hidden.targets, expected.values[expected.labels.index(label)][0])
        lens = analysis.JacobianLens.fit(
            theirs, [TEXT], corpus="words", dim_batch=8, max_seq_len=64, skip_first_positions=2, show_progress=False
        )
        mine = rows_of(model, stream, text=f"[BOS] {TEXT}", max_tokens=64)  # which theirs puts first
        near(mine.rows[0], lens.jacobians[0])
        theirs.enable_compatibility_mode()  # which moves all logits of a token by one number
        found = analysis.direct_logit_attribution(theirs, tokens, 5, 3, unit="head", pos=None)
        for label, values in zip(found.labels, found.attribution, strict=True):
            if label.startswith("L"):
                number, head = map(int, label[1:].split("H"))
                own = ours.layers[number].heads.targets[head]
                near(own[:, 1] - own[:, 0], values[0].detach())
