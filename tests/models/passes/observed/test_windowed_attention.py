"""Longformer and LED's encoder: their windows and global tokens as weights over all pairs of tokens."""

import copy
from functools import cache, partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from tests.client.tiny_models import tokenizer
from tests.models.answers.small_classifiers import NAMES
from tests.models.small_models import IDS, device
from tools.models_walk.differences import error
from tools.models_walk.model_types import built
from tools.models_walk.own_windows import dense
from torch import nn
from transformers import LongformerConfig

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.models.passes.float64_runs import compute_in_float64, float64
from attention_service.models.passes.observed import windowed_attention

EXACT = 1e-6
"""The largest difference, as a share of the largest number."""
WINDOWS = [4, 8]
LENGTHS = (3, 8, 9, 30)
"""Fewer tokens than a window has, whole windows, and others."""
QUESTION = [1, 7, 8, 2, 2, 9, 10, 11, 12, 13, 14, 15, 16, 2]
PAIRS = [QUESTION, [1, 5, 2, 2, 6, 7, 2]]
GLOBAL = {"Model": (), "ForMaskedLM": (), "ForTokenClassification": (), "ForSequenceClassification": (0,),
          "ForQuestionAnswering": (0, 1, 2), "ForMultipleChoice": tuple(range(5, 14))}  # fmt: skip
"""The global tokens of ``QUESTION``."""


@cache
def eager(head="ForMaskedLM"):
    names = {} if head == "ForQuestionAnswering" else {"id2label": NAMES, "num_labels": 3}
    config = LongformerConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, attention_window=WINDOWS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        sep_token_id=2, **names,
    )  # fmt: skip
    torch.manual_seed(7)
    model = getattr(transformers, f"Longformer{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return model.double()


@cache
def loaded(head="ForMaskedLM"):
    return LoadedModel("longformer", copy.deepcopy(eager(head)).requires_grad_(False), tokenizer(), device())


def near(found, expected):
    assert error(found, expected) <= EXACT


def ids(length):
    return (torch.arange(length) % 90 + 3).tolist()


def own_weights(output, texts, far):
    """The weights of each layer of transformers' own model, over pairs."""
    is_far = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.bool)
    for row in range(len(texts)):
        is_far[row, list(far[row])] = True
    rows = output.global_attentions or [None] * len(WINDOWS)
    return [
        dense(x, window // 2, is_far, of_far)
        for x, window, of_far in zip(output.attentions, WINDOWS, rows, strict=True)
    ]


@pytest.mark.parametrize("length", LENGTHS)
def test_windows_are_weights_over_all_pairs_of_tokens(length):
    model, tokens = loaded(), ids(length)
    info = model_info(model)
    assert (info["attention"], info["unseen"]) == ("observed", [])
    assert [layer.layer for layer in info["layers"]] == [0, 1]
    with torch.no_grad():
        expected = eager()(torch.tensor([tokens]), output_attentions=True, output_hidden_states=True)
    taps = ["weights", "v", "context", "output", "hidden", "logits"]
    request = ModelForwardRequest(tokens=tokens, return_=taps, positions=[*range(length)])
    reply = forward_reply(model, request)
    near(reply.logits, expected.logits[0])
    for layer, own, hidden in zip(
        reply.layers, own_weights(expected, [tokens], [()]), expected.hidden_states[1:], strict=True
    ):
        near(layer.weights, own[0])
        near(np.asarray(layer.weights) @ np.asarray(layer.v), layer.context)
        near(layer.output, np.asarray(layer.context).transpose(1, 0, 2).reshape(length, -1))
        near(layer.hidden, hidden[0])
    found = weights_reply(model, ModelWeightsRequest(tokens=tokens, top_k=1, statistics=["entropy"]))
    assert found.layers[0].statistics.entropy.shape == (4,)


@pytest.mark.sampled(head=3)
@pytest.mark.parametrize("head", GLOBAL)
def test_global_tokens_see_all_others_and_are_seen_by_all(head):
    model, far = loaded(head), GLOBAL[head]
    choice = head == "ForMultipleChoice"
    texts = [QUESTION, QUESTION[:4] + QUESTION[2:]][: 1 + choice]
    own = torch.tensor([QUESTION] * len(texts))
    with torch.no_grad():
        expected = eager(head)(own[None] if choice else own, output_attentions=True)
    tokens = [QUESTION] * len(texts) if choice else QUESTION
    reply = forward_reply(model, ModelForwardRequest(tokens=tokens, return_=["weights", "output"]))
    for layer, weights in zip(reply.layers, own_weights(expected, own.tolist(), [far] * len(own)), strict=True):
        near(layer.weights, weights if choice else weights[0])
        near(np.asarray(layer.weights).sum(-1), np.ones(layer.weights.shape[:-1]))
    if far:
        assert reply.layers[0].weights[..., far[0], :].min() > 0
        with pytest.raises(InvalidRequest, match="context is not seen there"):
            forward_reply(model, ModelForwardRequest(tokens=tokens, return_=["context"]))


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering"])
def test_texts_of_a_padded_batch_have_the_weights_of_each_alone(head):
    model = loaded(head)
    together = forward_reply(model, ModelForwardRequest(tokens=PAIRS, return_=["weights", "hidden"]))
    for row, text in enumerate(PAIRS):
        alone = forward_reply(model, ModelForwardRequest(tokens=text, return_=["weights", "hidden"]))
        for many, one in zip(together.layers, alone.layers, strict=True):
            length = len(text)
            near(many.weights[row][:, :length, :length], one.weights)
            assert not np.asarray(many.weights[row][:, :length, length:]).any()
            near(many.hidden[row][:length], one.hidden)


def test_predictions_of_heads_are_those_of_transformers():
    with torch.no_grad():
        mask = torch.tensor([[1] * len(text) + [0] * (len(QUESTION) - len(text)) for text in PAIRS])
        padded = torch.tensor([text + [0] * (len(QUESTION) - len(text)) for text in PAIRS])
        classes = eager("ForSequenceClassification")(padded, mask).logits
        answers = eager("ForQuestionAnswering")(padded, mask)
    found = forward_reply(loaded("ForSequenceClassification"), ModelForwardRequest(tokens=PAIRS, return_=["logits"]))
    near(found.logits, classes[:, None])
    request = partial(ModelForwardRequest, return_=["logits"])
    for row, text in enumerate(PAIRS):
        own = torch.stack([answers.start_logits[row], answers.end_logits[row]], -1)[: len(text)]
        reply = forward_reply(loaded("ForQuestionAnswering"), request(tokens=text, positions=[*range(len(text))]))
        near(reply.logits, own)


@pytest.mark.parametrize("head", ["ForQuestionAnswering", "ForMultipleChoice"])
def test_a_text_without_a_question_is_refused_by_a_head_for_questions(head):
    with pytest.raises(InvalidRequest, match="expected a question and a text with 3 separators") as fault:
        forward_reply(loaded(head), ModelForwardRequest(tokens=[QUESTION, IDS]))
    assert fault.value.param == "tokens.1"


def test_an_edit_of_weights_is_that_of_the_part_of_a_head():
    model, tokens = loaded(), ids(30)
    plain = copy.deepcopy(eager())

    def without_head(_module, _args, output):
        output[0][..., 8:16] = 0
        return output

    plain.longformer.encoder.layer[1].attention.self.register_forward_hook(without_head)
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0, -1]
    edits = {"1": [{"tap": "weights", "heads": [1], "set": 0}]}
    reply = forward_reply(model, ModelForwardRequest(tokens=tokens, edits=edits, return_=["logits"]))
    near(reply.logits[0], expected)


def test_gradients_of_weights_are_those_of_the_windows():
    model, tokens, own = loaded(), ids(30), []
    softmax = nn.functional.softmax

    def kept(x, *args, **options):
        found = softmax(x, *args, **options)
        if found.ndim == 4:
            found.retain_grad()
            own.append(found)
        return found

    plain = eager()
    with patch.object(nn.functional, "softmax", kept):
        value = plain(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)[7]
    value.backward()
    plain.zero_grad()
    request = ModelGradientsRequest(tokens=tokens, of={"token": 7}, wrt=["weights"])
    reply = ModelGradients(model, request).reply()
    for layer, weights, window in zip(reply.layers, own, WINDOWS, strict=True):
        expected = dense(weights.grad[:, : len(tokens)].transpose(1, 2), window // 2)[0]
        inside = dense(torch.ones(1, 1, len(tokens), window + 1), window // 2)[0, 0].bool()
        found = torch.tensor(layer.gradients["weights"])
        near(found[:, inside], expected[:, inside])


def test_the_encoder_of_led_is_seen_beside_its_decoder():
    plain = built("led").double()
    model = LoadedModel("led", copy.deepcopy(plain).requires_grad_(False), tokenizer(), device())
    stacks = ["encoder.0", "encoder.1", "decoder.0", "cross.0", "decoder.1", "cross.1"]
    assert sorted(map(str, model.places)) == sorted(stacks)
    assert model_info(model)["unseen"] == []
    tokens = ids(11)
    with torch.no_grad(), float64():
        start = torch.tensor([[plain.config.decoder_start_token_id]])
        expected = plain(torch.tensor([tokens]), decoder_input_ids=start, output_attentions=True)
    reply = forward_reply(model, ModelForwardRequest(tokens=tokens, return_=["weights", "logits"]))
    near(reply.logits[0], expected.logits[0, -1])
    found = {str(layer.layer): layer.weights for layer in reply.layers}
    for number in range(2):
        near(found[f"encoder.{number}"], dense(expected.encoder_attentions[number], 2)[0])
        near(found[f"cross.{number}"], expected.cross_attentions[number][0])


def test_a_module_that_returns_something_else_is_not_replaced(monkeypatch):
    model = copy.deepcopy(eager())
    module = model.longformer.encoder.layer[0].attention.self
    compute_in_float64(model)
    assert windowed_attention._is_same(module)
    own = module.forward
    module.forward = lambda *args, **options: (own(*args, **options)[0] * 1.001,)
    assert not windowed_attention._is_same(module)
    assert module.one_sided_attn_window_size == WINDOWS[0] // 2
    monkeypatch.setattr(windowed_attention, "_is_same", lambda _: False)
    with pytest.raises(InvalidCheckpoint, match="passes no attention"):
        LoadedModel("longformer", copy.deepcopy(eager()), tokenizer(), device())
