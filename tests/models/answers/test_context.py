"""The sources of an answer, against separate forwards of transformers and of this package."""

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.models.small_models import eager, loaded, near
from tools.models_walk.model_types import built
from torch.utils.flop_counter import FlopCounterMode

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.context import MAX_SENTENCES, ContextRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.validation import validate
from attention_service.models.answers.context.context_costs import context_report
from attention_service.models.answers.context.context_plan import plan_context
from attention_service.models.answers.context.context_run import ContextRun
from attention_service.models.answers.context.sentence_spans import sentence_spans
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device

FAMILIES = ("gpt2", "llama", "gemma2", "gpt_oss", "mistral", "deepseek_v3")
"""With learned positions, grouped heads, sliding windows, sinks, and latent keys."""
PROMPT, ANSWER = "the cat sat on\nthe dog on mat cat sat\nthe mat", "\nthe dog sat\non the mat"
EVERY = ["attention", "gradient", "hidden", "removed", "lookback"]
IDS = [3, 4, 5, 6, 3, 8, 6, 7, 4, 5, 3, 7, 3, 8, 5, 6, 3, 7]
SOURCES, SENTENCES, FIRST = [range(4), range(4, 10), range(10, 12)], [range(3), range(3, 6)], 12
"""The tokens of each source, those of each sentence of the answer, and the first of the answer."""


def answered(model, free_bytes=2**30, **fields):
    request = validate(ContextRequest, {"text": PROMPT, "answer": ANSWER, "return": EVERY} | fields)
    run = ContextRun(model, ModelCosts(model), request, plan_context(model, request), free_bytes)
    return at_once(run.parts()), run


def sentences(logits):
    """The log-probability of each sentence, by logits whose last ones predict the answer."""
    logs = logits.log_softmax(-1)[-len(IDS) + FIRST - 1 : -1]
    own = logs.gather(1, torch.tensor(IDS[FIRST:])[:, None])[:, 0]
    return [float(own[each.start : each.stop].sum()) for each in SENTENCES]


@torch.no_grad()
def logits_of(model, ids, **more):
    return model(torch.tensor([ids]), use_cache=False, **more).logits[0].double()


@pytest.mark.sampled(family=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_ablations_are_separate_forwards_of_transformers(family):
    model, reference = loaded(family), eager(family)
    whole = sentences(logits_of(reference, IDS))
    hidden, removed = [], []
    for source in SOURCES:
        mask = torch.ones(1, len(IDS), dtype=torch.long)
        mask[0, source.start : source.stop] = 0
        positions = torch.arange(len(IDS))[None]
        hidden.append(sentences(logits_of(reference, IDS, attention_mask=mask, position_ids=positions)))
        removed.append(sentences(logits_of(reference, [each for at, each in enumerate(IDS) if at not in source])))
    reply, run = answered(model)
    assert [each.counted for each in run.stages] == [3, 1, 3, 3]
    near([each.logprob for each in reply.answer], whole, 1e-4)
    near(reply.ablation.hidden, np.array(hidden) - whole, 1e-4)
    near(reply.ablation.removed, np.array(removed) - whole, 1e-4)
    alone, run = answered(model, alone=True)
    assert [each.counted for each in run.stages] == [3, 1, 1, 1, 1, 1, 1, 1]
    near(alone.ablation.hidden, reply.ablation.hidden, 1e-5)
    near(alone.ablation.removed, reply.ablation.removed, 1e-5)


def test_a_model_of_which_some_layers_have_no_keys_leaves_sources_out_one_by_one():
    reference = eager("lfm2")
    whole = sentences(logits_of(reference, IDS))
    left = [[each for at, each in enumerate(IDS) if at not in source] for source in SOURCES]
    reply, run = answered(loaded("lfm2"), **{"return": ["removed"]})
    assert [each.counted for each in run.stages] == [1, 1, 1, 1]
    near(reply.ablation.removed, [np.array(sentences(logits_of(reference, ids))) - whole for ids in left], 1e-4)


def test_a_hidden_source_is_one_whose_keys_have_no_weight_in_any_layer():
    model = loaded("llama")
    edit = Edit(tap="weights", keys=[*SOURCES[1]], set=0.0, renormalize=True)
    request = ModelForwardRequest(text=PROMPT, answer=ANSWER, edits={"0": [edit], "1": [edit]}, top_k=0)
    logs = [each.logprob for each in forward_reply(model, request).answer]
    reply, _ = answered(model, **{"return": ["hidden"]})
    expected = [sum(logs[each.start : each.stop]) for each in SENTENCES]
    near(reply.ablation.hidden[1] + np.array([each.logprob for each in reply.answer]), expected, 1e-4)


def test_ablations_of_an_observed_attention_are_separate_forwards():
    """Of BLOOM, which counts positions by its mask: a hidden source is an edit of its weights."""
    model = LoadedModel("bloom", built("bloom"), tokenizer(), Device.open("cpu"))
    edit = Edit(tap="weights", keys=[*SOURCES[0]], set=0.0, renormalize=True)
    edits = {key: [edit] for key in model.places}
    logs = [
        each.logprob
        for each in forward_reply(model, ModelForwardRequest(text=PROMPT, answer=ANSWER, edits=edits, top_k=0)).answer
    ]
    reply, _ = answered(model)
    whole = np.array([each.logprob for each in reply.answer])
    near(reply.ablation.hidden[0] + whole, [sum(logs[each.start : each.stop]) for each in SENTENCES], 1e-4)
    for source, change in zip(SOURCES, reply.ablation.removed, strict=True):
        left = [each for at, each in enumerate(IDS) if at not in source]
        near(change + whole, sentences(logits_of(built("bloom"), left)), 1e-4)


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_and_lookback_are_sums_of_the_models_weights(family):
    model = loaded(family)
    layers = weights_reply(model, ModelWeightsRequest(text=PROMPT, answer=ANSWER)).layers
    weights = np.stack([np.asarray(layer.weights)[:, FIRST - 1 : -1] for layer in layers])  # [layers, H, T, L]
    reply, _ = answered(model, heads=1000)
    by_head = np.stack(
        [
            [weights[:, :, part, :][..., source].sum(-1).mean(-1) for part in map(_slice, SENTENCES)]
            for source in map(_slice, SOURCES)
        ]
    )  # [S, A, layers, H]
    near(reply.attention, by_head.mean((2, 3)))
    assert len(reply.heads) == weights.shape[0] * weights.shape[1]
    for each in reply.heads:
        near(each.attention, by_head[:, :, each.layer, each.head])
    sizes = [abs(each.effect) for each in reply.heads]
    assert sizes == sorted(sizes, reverse=True)
    for layer, own in zip(reply.lookback, weights, strict=True):
        ratios = []
        for query in range(len(IDS) - FIRST):
            prompt = own[:, query, :FIRST].mean(-1)
            new = own[:, query, FIRST : FIRST + query].mean(-1) if query else np.zeros(len(own))
            ratios.append(prompt / (prompt + new))
        near(layer.heads, np.stack([np.stack(ratios, 1)[:, _slice(part)].mean(1) for part in SENTENCES], 1))


def _slice(tokens):
    return slice(tokens.start, tokens.stop)


def test_gradients_of_the_sentences_sum_to_those_of_the_answer():
    model = loaded("gemma2")
    whole = ModelGradients(model, ModelGradientsRequest(text=PROMPT, answer=ANSWER)).reply()
    reply, _ = answered(model, heads=1000)
    by_token = np.asarray(whole.tokens)
    near(np.asarray(reply.gradient).sum(1), [by_token[_slice(source)].sum() for source in SOURCES], 1e-4)
    heads = {(layer.layer, head): effect for layer in whole.layers for head, effect in enumerate(layer.heads)}
    for each in reply.heads:
        near(each.effect, heads[each.layer, each.head], 1e-4)


def test_sources_by_text_by_span_and_by_themselves_are_the_same():
    model = loaded("gpt2")
    names = [{"name": "first", "text": "the cat sat on"}, {"span": [15, 37]}]
    reply, _ = answered(model, sources=names)
    assert [(each.name, each.text, each.tokens) for each in reply.sources] == [
        ("first", "the cat sat on", (0, 4)),
        ("source 2", "the dog on mat cat sat", (4, 10)),
    ]
    split, _ = answered(model)
    assert [each.name for each in split.sources] == ["sentence 1", "sentence 2", "sentence 3"]
    near(reply.ablation.removed, split.ablation.removed[:2], 1e-5)
    own, _ = answered(model, text=None, sources=[{"text": "the cat sat on\n"}, {"text": PROMPT[15:]}])
    assert (own.prompt, [each.tokens for each in own.sources]) == (PROMPT, [(0, 4), (4, 12)])
    near(own.ablation.hidden[0], split.ablation.hidden[0], 1e-5)


def chat():
    """A model with a chat template that writes each message in a line of its own."""
    words = tokenizer()
    each = "{% for message in messages %}mat {{ message.content }}\n{% endfor %}"
    words.chat_template = each + "{% if add_generation_prompt %}mat {% endif %}"
    return LoadedModel("chat", tiny("llama"), words, Device.open("cpu"))


def test_messages_are_sources_and_the_last_of_the_assistant_is_the_answer():
    messages = [{"role": "system", "content": "the cat"}, {"role": "user", "content": "the dog sat\non mat"}]
    model = chat()
    fields = {"text": None, "messages": messages, "split": "messages", "answer": "the dog"}
    reply, _ = answered(model, **fields)
    assert [(each.name, each.text) for each in reply.sources] == [
        ("system 1", "the cat"),
        ("user 2", "the dog sat\non mat"),
    ]
    assert (reply.answer_text, [each.text for each in reply.answer]) == ("the dog", ["the dog"])
    assert reply.labels.tokens[slice(*reply.answer[0].tokens)] == ["the", "dog"]
    ended = fields | {"messages": [*messages, {"role": "assistant", "content": "the dog"}], "answer": None}
    near(answered(model, **ended)[0].ablation.hidden, reply.ablation.hidden)
    split, _ = answered(model, **fields | {"split": "sentences"})
    assert [each.text for each in split.sources] == ["the cat", "the dog sat", "on mat"]


@pytest.mark.parametrize(
    ("family", "fields", "param"),
    [
        ("t5", {}, "model"),
        ("bart", {}, "model"),
        ("bert", {}, "model"),
        ("lfm2", {}, "return.2"),
        ("gpt2", {"sources": [{"text": "die Katze"}]}, "sources.0.text"),
        ("gpt2", {"sources": [{"text": "the dog"}, {"text": "the cat"}]}, "sources.1.text"),
        ("gpt2", {"sources": [{"span": [0, 9]}, {"span": [4, 12]}]}, "sources.1"),
        ("gpt2", {"sources": [{"span": [0, 999]}]}, "sources.0.span"),
        ("gpt2", {"sources": [{"span": [14, 15]}]}, "sources.0"),
        ("gpt2", {"text": "\n\n the"[:2], "answer": "the"}, "split"),
        ("gpt2", {"text": "the cat", "answer": "the"}, "return.3"),
        ("gpt2", {"text": "the cat " * 40}, "text"),
        ("gpt2", {"messages": [{"role": "user", "content": "the"}], "text": None, "answer": None}, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_by_name(family, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        answered(loaded(family), **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"text": "a", "split": "sentences", "sources": [{"text": "a"}]}, "split"),
        ({"text": "a", "split": "messages"}, "split"),
        ({"sources": [{"span": [0, 1]}]}, "sources.0.span"),
        ({"text": "a", "sources": [{"span": [1, 1]}]}, "sources.0.span"),
        ({"text": "a", "sources": [{"name": "a"}]}, "sources.0.text"),
        ({"text": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "content": "a"}], "answer": "a"}, "answer"),
        ({"text": "a", "return": []}, "return"),
        ({"text": "a", "return": ["weights"]}, "return.0"),
        ({"text": "a", "layers": [0]}, "layers"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        validate(ContextRequest, fields)
    assert caught.value.param == param


def test_a_price_has_sizes_or_a_prompt():
    for fields, param in (
        ({"text": "a", "length": 5}, "length"), ({"answer": "a"}, "answer"), ({"return": ["hidden"]}, "return"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            validate(ModelComplexityRequest, fields)
        assert caught.value.param == param
    assert validate(ModelComplexityRequest, {"length": 8}).context is None


@pytest.mark.sampled(returned=3)
@pytest.mark.parametrize("returned", [["attention"], ["gradient"], ["hidden"], ["removed"], EVERY])
def test_the_price_counts_the_products_that_run(returned):
    """Those of the pass are counted by PyTorch, with masked pairs too, which the price leaves out."""
    model = loaded("llama")
    request = validate(ContextRequest, {"text": PROMPT, "answer": ANSWER, "return": returned})
    run = ContextRun(model, ModelCosts(model), request, plan_context(model, request), 2**30)
    with FlopCounterMode(display=False) as counter:
        at_once(run.parts())
    price = context_report(
        model, ModelCosts(model),
        validate(ModelComplexityRequest, {"text": PROMPT, "answer": ANSWER, "return": returned}), 2**30,
    ).context  # fmt: skip
    assert price.passes == sum(stage.counted for stage in run.stages)
    assert price.peak_bytes == max(stage.peak_bytes for stage in run.stages)
    assert (price.sources, price.tokens) == (3, len(IDS))
    assert price.flops == pytest.approx(counter.get_total_flops(), rel=0.3)


def test_the_time_follows_the_passes_that_ran():
    """As a machine that is busy makes each of them take longer."""
    model, costs = loaded("llama"), ModelCosts(loaded("llama"))
    body = {"text": PROMPT, "answer": ANSWER}
    price = validate(ModelComplexityRequest, body)
    before = context_report(model, costs, price, 2**30).context.predicted_ms
    for ratio in (3.0, 1.0, 3.0, 3.0, 3.0):
        costs.pace.note("context", 2.0, 2.0 * ratio)
    assert context_report(model, costs, price, 2**30).context.predicted_ms == pytest.approx(3 * before)


def test_passes_have_as_many_rows_as_there_is_memory_for():
    model = loaded("llama")
    reply, run = answered(model)
    small, few = answered(model, free_bytes=2**18)
    assert len(few.stages) > len(run.stages)
    near(small.ablation.removed, reply.ablation.removed)


def test_an_answer_of_many_sentences_has_all_that_follow_in_its_last():
    model = LoadedModel("long", tiny("llama", max_position_embeddings=512), tokenizer(), Device.open("cpu"))
    reply, _ = answered(model, answer="\nthe cat" * (MAX_SENTENCES + 9), **{"return": ["attention"]})
    assert len(reply.answer) == MAX_SENTENCES
    assert reply.answer[-1].tokens[1] == FIRST + 2 * (MAX_SENTENCES + 9)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("The cat sat. The dog ran!  Did it? Yes…", ["The cat sat.", "The dog ran!", "Did it?", "Yes…"]),
        ("Dr. Smith met J. Doe, e.g. in 1.5 hours. Then", ["Dr. Smith met J. Doe, e.g. in 1.5 hours.", "Then"]),
        ("A list:\n1. one\n2. two\n", ["A list:", "1. one", "2. two"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("猫が座った。犬が走った。", ["猫が座った。", "犬が走った。"]),
        (" \n ", []),
        ("no end", ["no end"]),
    ],
)
def test_sentences(text, sentences):
    assert [text[slice(*span)] for span in sentence_spans(text)] == sentences
