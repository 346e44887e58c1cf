"""A whole model in the worker gives the numbers of its eager self, and its edits and statistics those of modules."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.models.small_models import DECODERS, ENCODERS, FAMILIES, IDS, PAIRS, device, eager, loaded, near
from tests.stand_in_gpu import stand_in_gpu
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertGenerationConfig,
    BertGenerationDecoder,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LongT5Config,
    LongT5ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForCausalLM,
)

from attention_contract.errors import InvalidCheckpoint, InvalidRequest, Stuck
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.schemas.prompts import Message
from attention_contract.validation import validate
from attention_service.core.inspection.statistics import HEAD_STATISTICS
from attention_service.models.answers.model_forward import forward_reply, recorded_forward
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import recorded_weights, weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.folders.model_catalogue import find_folder
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.inputs.model_inputs import TextInputs
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info, unseen_layers
from attention_service.models.passes import attention_pass
from attention_service.models.process.process_pipes import problem_of
from attention_service.models.process.served_model import ServedModel

NOT_COLLECTED = {"albert", "distilbert"}  # eager layers whose weights the library does not collect in the running order


def reference(family, ids, **options):
    """The outputs of the eager model, with the weights of each attention by the key of its layer."""
    model, start = eager(family), loaded(family).reader
    given = {"input_ids": torch.tensor([ids])}
    if family in PAIRS:
        given["decoder_input_ids"] = torch.tensor([[start._start, *options.pop("target", ())]])
    with torch.no_grad():
        outputs = model(**given, output_attentions=True, output_hidden_states=True)
    if family not in PAIRS:
        return outputs, dict(zip(loaded(family).places, outputs.attentions or (), strict=False))
    stacks = {
        "encoder": outputs.encoder_attentions, "decoder": outputs.decoder_attentions, "cross": outputs.cross_attentions,
    }  # fmt: skip
    return outputs, {f"{stack}.{n}": x for stack, several in stacks.items() for n, x in enumerate(several)}


@pytest.mark.sampled(family=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_weights_are_those_of_the_eager_model(family):
    model = loaded(family)
    returns = ["weights", "hidden", *(["logits"] if model.head.predicts else [])]
    positions = [*range(1 if family in PAIRS else len(IDS))] if model.head.predicts else None
    fields: dict[str, Any] = {"positions": positions, "top_k": 3} if model.head.predicts else {}
    reply = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=returns, **fields))
    outputs, weights = reference(family, IDS)
    if model.head.predicts:
        near(reply.logits, outputs.logits[0])
        best = outputs.logits[0].double().softmax(-1).topk(3)
        for each in reply.predictions:
            assert [token.id for token in each.top] == best.indices[each.position].tolist()
            near([token.probability for token in each.top], best.values[each.position])
    if family in PAIRS:
        near(next(x for x in reply.layers if x.layer == "decoder.0").hidden, outputs.decoder_hidden_states[1][0])
    else:
        near(reply.entered, outputs.hidden_states[0][0])
    assert [str(each.layer) for each in reply.layers] == [*model.places]
    for each in reply.layers:
        if str(each.layer) in weights:
            near(each.weights, weights[str(each.layer)][0])
    assert bool(weights) or family in ENCODERS


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_times_values_are_the_context_and_rows_sum_to_one(family):
    reply = forward_reply(loaded(family), ModelForwardRequest(tokens=IDS, return_=["weights", "v", "context"]))
    for each in reply.layers:
        groups = each.weights.shape[0] // each.v.shape[0]
        near(each.weights @ each.v.repeat(groups, axis=0), each.context)
        sums = each.weights.sum(-1)
        assert (sums < 1).all() if family == "gpt_oss" else np.allclose(sums, 1, atol=1e-6)


@pytest.mark.sampled(family=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_those_of_the_eager_weights(family):
    names = [name for name in HEAD_STATISTICS if name not in {"induction", "duplicate_token"}]
    model = loaded(family)
    reply = weights_reply(model, ModelWeightsRequest(tokens=IDS, statistics=names, top_k=2))
    whole = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["weights"]))
    for each, taps in zip(reply.layers, whole.layers, strict=True):
        near(each.weights, taps.weights)
        shares = taps.weights.astype(np.float64) / taps.weights.sum(-1, keepdims=True, dtype=np.float64)
        i, j = np.indices(shares.shape[1:])
        near(each.statistics.mean_distance, (shares * abs(i - j)).sum(-1).mean(-1))
        near(each.statistics.entropy, -(shares * np.log(np.where(shares > 0, shares, 1))).sum(-1).mean(-1))
        near(each.statistics.first_key, shares[..., 0].mean(-1))
        near(each.top.weights[..., 0], taps.weights.max(-1))
        assert each.queries == shares.shape[1]


@pytest.mark.sampled(family=8)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_many_give_the_outputs_of_their_layers(family, monkeypatch):
    def reply():
        return weights_reply(loaded(family), ModelWeightsRequest(tokens=IDS, statistics=["entropy"]))

    few = reply()
    monkeypatch.setattr(attention_pass, "_MANY_SCORES", 1)
    many = reply()
    assert many.ran.kernels == ["materialized"]
    for one, other in zip(few.layers, many.layers, strict=True):
        near(other.weights, one.weights)
        near(other.statistics.entropy, one.statistics.entropy)


@pytest.mark.long
@pytest.mark.sampled(family=2)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "t5"])
def test_statistics_alone_compute_each_weight_once(family, monkeypatch):
    """Their traversal gives the outputs of the layers too: no kernel computes the scores a second time."""

    def reply(**options):
        with FlopCounterMode(display=False) as counted:
            found = weights_reply(loaded(family), ModelWeightsRequest(tokens=IDS, **options))
        flops = counted.get_flop_counts()["Global"]
        return found, sum(count for name, count in flops.items() if "bmm" in str(name) or "scaled_dot" in str(name))

    few, _ = reply(return_weights=False)
    monkeypatch.setattr(attention_pass, "_MANY_SCORES", 1)
    whole, products = reply()
    alone, same = reply(return_weights=False, statistics=[])
    assert alone.ran.kernels == ["materialized"]
    assert same <= products
    many, _ = reply(return_weights=False)
    for one, other, third in zip(few.layers, many.layers, whole.layers, strict=True):
        for name in ("entropy", "max_weight", "mean_distance", "first_key", "own_position"):
            near(getattr(other.statistics, name), getattr(one.statistics, name))
            near(getattr(other.statistics, name), getattr(third.statistics, name))


@pytest.mark.sampled(family=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_and_single_texts_agree(family):
    model, texts = loaded(family), [IDS, IDS[:4]]
    returns = ["weights", "context", *(["logits"] if model.head.predicts else [])]
    batch = forward_reply(model, ModelForwardRequest(tokens=texts, return_=returns))
    statistics = weights_reply(model, ModelWeightsRequest(tokens=texts, statistics=[*HEAD_STATISTICS]))
    for number, ids in enumerate(texts):
        single = forward_reply(model, ModelForwardRequest(tokens=ids, return_=returns))
        alone = weights_reply(model, ModelWeightsRequest(tokens=ids, statistics=[*HEAD_STATISTICS]))
        if model.head.predicts:
            near(batch.logits[number], single.logits)
        pads = len(texts[0]) - len(ids)
        left = family in DECODERS
        for ours, theirs in zip(batch.layers, single.layers, strict=True):
            keys = slice(pads, None) if left else slice(0, theirs.weights.shape[-1])
            rows = slice(pads, None) if left else slice(0, theirs.weights.shape[-2])
            near(ours.weights[number][:, rows, keys], theirs.weights)
            near(ours.context[number][:, rows], theirs.context)
        for ours, theirs in zip(statistics.layers, alone.layers, strict=True):
            assert ours.queries[number] == theirs.queries
            for name in HEAD_STATISTICS:
                near(getattr(ours.statistics, name)[number], getattr(theirs.statistics, name))


@pytest.mark.sampled(family=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_edits_of_nothing_change_nothing_and_others_do(family):
    model = loaded(family)
    layer = str(list(model.places)[-1])
    nothing = {layer: [{"tap": "weights", "scale": 1.0}, {"tap": "output", "scale": 1.0}]}
    something = {layer: [{"tap": "context", "heads": [1], "set": 0.0}]}
    plain = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["hidden", "context", "output"]))
    same = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["hidden", "context", "output"], edits=nothing))
    changed = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["hidden", "context"], edits=something))
    for ours, theirs in zip(same.layers, plain.layers, strict=True):
        near(ours.hidden, theirs.hidden)
        near(ours.output, theirs.output)
    assert not changed.layers[-1].context[1].any()
    assert changed.layers[-1].context[0].any()
    assert abs(changed.layers[-1].hidden - plain.layers[-1].hidden).max() > 1e-4


def test_an_edit_of_an_output_is_that_of_its_heads():
    model, everything = loaded("llama"), {"0": [{"tap": "context", "set": 0.0}]}
    heads = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["hidden"], edits=everything))
    output = {"0": [{"tap": "output", "set": 0.0}]}
    whole = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["hidden", "output"], edits=output))
    assert not whole.layers[0].output.any()
    near(whole.layers[1].hidden, heads.layers[1].hidden)


def test_predictions_are_compared_with_those_without_the_edits():
    model = loaded("gpt2")
    request = {"text": "the cat sat on", "edits": {"1": [{"tap": "context", "set": 0.0}]}, "compare": "unedited"}
    [prediction] = forward_reply(model, ModelForwardRequest(**request)).predictions
    [plain] = forward_reply(model, ModelForwardRequest(text="the cat sat on")).predictions
    unedited = {each.id: each.probability for each in plain.top}
    assert prediction.divergence > 0
    for each in prediction.top:
        if each.id in unedited:
            assert each.unedited_probability == pytest.approx(unedited[each.id])
    [same] = forward_reply(model, ModelForwardRequest(text="the cat sat on", compare="unedited")).predictions
    assert same.divergence == 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "t5"])
def test_weights_are_compared_with_those_of_a_model_without_any_edit(family):
    """The weights of later layers change too, though these have no edit."""
    model, first = loaded(family), next(iter(loaded(family).places))
    edits = {first: [{"tap": "context", "heads": [0], "set": 0.0}]}
    request = {"tokens": [IDS, IDS[:4]], "statistics": ["entropy", "previous_token"], "pool": 3}
    plain = weights_reply(model, ModelWeightsRequest(**request))
    edited = weights_reply(model, ModelWeightsRequest(**request, edits=edits, compare="unedited"))
    for before, after in zip(plain.layers, edited.layers, strict=True):
        near(after.differences.weights, after.weights - before.weights)
        near(after.differences.statistics.entropy, after.statistics.entropy - before.statistics.entropy)
        largest = np.abs(after.weights - before.weights)[..., :3, :3].max((-2, -1))
        near(np.abs(after.differences.pooled[..., 0, 0]), largest)
    assert np.abs(edited.layers[-1].differences.weights).max() > 1e-3
    same = weights_reply(model, ModelWeightsRequest(**request, compare="unedited"))
    assert not any(layer.differences.weights.any() for layer in same.layers)


def test_a_selection_narrows_the_taps_and_not_the_statistics():
    model = loaded("llama")
    whole = weights_reply(model, ModelWeightsRequest(tokens=IDS))
    some = weights_reply(model, ModelWeightsRequest(tokens=IDS, layers=[1], select={"heads": [2], "queries": [3, 1]}))
    [layer] = some.layers
    assert layer.layer == 1
    near(layer.weights, whole.layers[1].weights[[2]][:, [3, 1]])
    near(layer.statistics.entropy, whole.layers[1].statistics.entropy)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_what_is_kept_is_a_recording_of_the_run(family):
    model = loaded(family)
    request = ModelForwardRequest(text="the cat sat", return_=["weights", "hidden"], keep=True)
    found = recorded_forward(model, request)
    reply, recording = found.reply, found.recording
    stack = recording.encoder if family == "t5" else recording.layers
    near(stack["0.weights"], reply.layers[0].weights)
    near(stack["0.hidden"], reply.layers[0].hidden)
    near(stack["embeddings"], reply.entered)
    assert recording.text == "the cat sat"
    weights = recorded_weights(
        model, ModelWeightsRequest(text="the cat sat", keep=True, layers=[reply.layers[0].layer])
    )
    near(weights.reply.layers[0].weights, reply.layers[0].weights)
    assert len(weights.recording.attentions) == 1
    assert recorded_forward(model, ModelForwardRequest(text="the cat")).recording is None


def test_labels_tell_tokens_and_their_characters():
    reply = forward_reply(loaded("llama"), ModelForwardRequest(text=["the cat sat", "dog"]))
    long, short = reply.labels
    assert long.tokens == ["the", "cat", "sat"]
    assert long.spans == [(0, 3), (4, 7), (8, 11)]
    assert short.tokens == ["[PAD]", "[PAD]", "dog"]
    assert short.spans == [None, None, (0, 3)]
    assert [(each.text, each.position) for each in reply.predictions] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("tokens", {"tokens": [96]}),
        ("tokens", {"tokens": [3] * 65}),
        ("text", {"text": " "}),
        ("target", {"text": "the", "target": "cat"}),
        ("messages", {"messages": [{"role": "user", "content": "the cat"}]}),
        ("images", {"images": [{"base64": "aaaa"}]}),
        ("layers.0", {"text": "the", "layers": [7], "return": ["weights"]}),
        ("edits.7", {"text": "the", "edits": {"7": [{"tap": "context", "set": 0.0}]}}),
        ("edits.0.0.heads", {"text": "the", "edits": {"0": [{"tap": "context", "heads": [4], "set": 0.0}]}}),
        ("edits.0.0.queries", {"text": "the", "edits": {"0": [{"tap": "output", "queries": [1], "set": 0.0}]}}),
        ("select.heads", {"text": "the", "return": ["weights"], "select": {"heads": [4]}}),
        ("positions.0", {"text": "the", "positions": [1]}),
        ("keep", {"text": ["the", "cat"], "keep": True}),
    ],
)
def test_a_bad_request_names_its_field(field, request_):
    with pytest.raises(InvalidRequest) as fault:
        forward_reply(loaded("llama"), ModelForwardRequest.model_validate(request_))
    assert fault.value.param == field


def test_a_model_describes_itself():
    info = model_info(loaded("lfm2"))
    assert info["unseen"] == ["conv"]
    assert unseen_layers(loaded("lfm2")) == {0: "conv has no weights of pairs of tokens"}
    assert unseen_layers(loaded("llama")) == unseen_layers(loaded("gemma2")) == {}
    [layer] = info["layers"]
    assert (layer.layer, layer.heads, layer.kv_heads, layer.head_dim) == (1, 4, 2, 8)
    assert info["generates"]
    assert model_info(loaded("t5"))["takes"] == ["text", "target"]
    assert not model_info(loaded("bert"))["generates"]


def test_bytes_that_are_parts_of_characters_look_different():
    words = Tokenizer(BPE({letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    words.pre_tokenizer, words.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    spoken = PreTrainedTokenizerFast(tokenizer_object=words)
    reader = LoadedModel("bytes", tiny("bert"), spoken, device()).reader
    assert reader.readable(spoken("a é\n").input_ids) == ["a", " ", r"\xc3", r"\xa9", "\n"]


def test_what_a_process_holds_of_a_gpu_is_reported_once_much_that_is_free_went_back(monkeypatch):
    memory = {"reserved": 2**30, "allocated": 2**28}
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: memory["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: memory["allocated"])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: memory.update(reserved=memory["allocated"]))
    served = ServedModel(loaded("llama"))
    assert served.held_bytes() is None
    on_gpu = ServedModel.__new__(ServedModel)
    on_gpu.loaded = SimpleNamespace(device=SimpleNamespace(torch=torch.device("cuda", 0)))
    assert on_gpu.held_bytes() == 2**28
    memory["reserved"] += 2**20
    assert on_gpu.held_bytes() == 2**28 + 2**20


def test_a_process_whose_gpu_is_lost_ends_after_the_request_that_lost_it(monkeypatch):
    with stand_in_gpu(monkeypatch) as gpu:
        served = ServedModel.__new__(ServedModel)
        served.loaded = SimpleNamespace(device=gpu)
        served.recover(RuntimeError("a launch with sizes that no device has"))
        gpu.poison()
        with pytest.raises(Stuck):
            served.recover(gpu.poisoned)


def test_memory_that_runs_out_in_a_process_is_reported_as_such():
    with pytest.raises(RuntimeError, match="allocate") as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert problem_of(caught.value)["code"] == "never_fits"


@pytest.mark.parametrize(
    ("sizes", "param"),
    [
        ({"length": 10**9}, "length"),
        ({"length": 2**31 - 1, "batch": 2**30, "weights": True}, "length"),
        ({"new_tokens": 2**31 - 1, "batch": 2**30}, "new_tokens"),
        ({"length": 10**6, "batch": 2**31 - 1}, "batch"),
    ],
)
def test_sizes_whose_counts_no_reply_holds_are_refused_by_their_field(sizes, param):
    with pytest.raises(InvalidRequest, match="do not fit 64 bits") as fault:
        ModelCosts(loaded("llama")).report(ModelComplexityRequest(**sizes), 2**40)
    assert fault.value.param == param


@pytest.mark.parametrize("family", ["mistral", "gemma2", "llama"])
def test_costs_count_no_key_behind_a_sliding_window(family):
    """Those of a pass, and of a token after it with the cache that transformers keeps."""
    model, length = eager(family), 20
    costs = ModelCosts(loaded(family)).report(ModelComplexityRequest(length=length), 2**40)
    tokens = torch.ones(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as prefill, torch.no_grad():
        cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values
    assert costs.cache_bytes == sum(each.keys.nbytes + each.values.nbytes for each in cache.layers)
    with FlopCounterMode(display=False) as step, torch.no_grad():
        model(tokens[:, :1], past_key_values=cache)
    assert costs.per_token.flops == step.get_total_flops()
    hidden = 0
    for place in loaded(family).places.values():
        seen = sum(min(query + 1, place.reach or length) for query in range(length))
        hidden += 4 * place.widths.heads * place.widths.head_dim * (length**2 - seen)
    assert costs.prefill.flops == prefill.get_total_flops() - hidden
    windows = [place.reach for place in loaded(family).places.values() if place.reach]
    assert bool(windows) == (family != "llama")


def test_costs_count_the_latents_that_are_cached_and_what_is_made_of_them_at_each_step():
    model, costs = eager("deepseek_v3"), ModelCosts(loaded("deepseek_v3"))
    prompts, steps = [], []
    for length in (12, 20):
        prompts.append(costs.report(ModelComplexityRequest(length=length), 2**40))
        tokens = torch.ones(1, length, dtype=torch.int64)
        with torch.no_grad():
            cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values
            held = sum(each.keys.nbytes + each.values.nbytes for each in cache.layers)
            with FlopCounterMode(display=False) as step:
                model(tokens[:, :1], past_key_values=cache)
        assert prompts[-1].cache_bytes == held
        steps.append(step.get_total_flops())
    assert prompts[1].per_token.flops - prompts[0].per_token.flops == steps[1] - steps[0]


def test_of_several_chat_templates_the_default_is_taken():
    messages = [Message(role="user", content="the cat")]
    several = {"tool_use": "no", "default": "{{ messages[0].content }}!"}
    for templates, written in ((several, "the cat!"), ({"tool_use": "no"}, None)):
        words = tokenizer()
        words.chat_template = templates
        reader = TextInputs(eager("llama"), words)
        assert ("messages" in reader.takes) == (written is not None)
        if written is not None:
            assert reader.conversation(messages).text == written
            continue
        with pytest.raises(InvalidRequest, match="no default chat template"):
            reader.conversation(messages)


def test_a_chat_template_that_computes_too_much_refuses_the_messages(monkeypatch):
    reader = loaded("llama").reader
    monkeypatch.setattr(reader, "template", "{% for each in range(10**9) %}a{% endfor %}")
    with pytest.raises(InvalidRequest, match="Range too big"):
        reader.conversation([Message(role="user", content="the cat")])


_SMALL = {"vocab_size": 12, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
_BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
_DECODER = BertConfig(**_BERT, **_SMALL, is_decoder=True, add_cross_attention=True)
PREDICTING = {
    "marian": MarianMTModel(
        MarianConfig(
            d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, decoder_start_token_id=0, **_SMALL,
        )
    ),
    "encoder-decoder": EncoderDecoderModel(
        EncoderDecoderConfig.from_encoder_decoder_configs(
            BertConfig(**_BERT, **_SMALL), _DECODER, decoder_start_token_id=2, pad_token_id=0
        )
    ),
    "bert-generation": BertGenerationDecoder(BertGenerationConfig(**_BERT, **_SMALL, is_decoder=True)),
}  # fmt: skip


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", PREDICTING)
def test_models_that_predict_are_loaded_with_their_heads(kind, tmp_path):
    """Their classes have names of no common end."""
    own = PREDICTING[kind].eval()
    own.save_pretrained(tmp_path / "net")
    folder = find_folder(tmp_path, "net")
    assert folder.info("net", None).generates
    model = LoadedModel.load(tmp_path / "net", dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    assert model_info(model)["generates"]
    reply = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["logits", "weights"]))
    given = {"decoder_input_ids": torch.tensor([reply.labels.ids])} if model.reader.pairs else {}
    with torch.no_grad():
        near(reply.logits, own(input_ids=torch.tensor([IDS]), **given).logits[0, -1:].numpy())
    stacks = {str(layer.layer).partition(".")[0] for layer in reply.layers}
    assert stacks == ({"encoder", "decoder", "cross"} if model.reader.pairs else {"0"})
    model.close()


def test_a_decoder_reads_and_predicts_tokens_of_its_own_vocabulary():
    """The encoder's has 12 tokens, and the decoder's 8."""
    decoder = BertConfig(**_BERT, **_SMALL | {"vocab_size": 8}, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(**_BERT, **_SMALL), decoder, decoder_start_token_id=2, pad_token_id=0
    )
    model = LoadedModel("pair", EncoderDecoderModel(config).eval().requires_grad_(False), tokenizer(), device())
    upstream = np.ones((1, 8), np.float32)
    reply = ModelGradients(model, ModelGradientsRequest(tokens=IDS, of={"upstream": upstream})).reply()
    near(reply.value, forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["logits"])).logits.sum(), 1e-5)
    for param, request in {
        "target": {"target": "Katze"},
        "of.token": {"of": {"token": 9}},
        "of.against": {"of": {"against": "Katze"}},
        "of.upstream": {"of": {"upstream": [[1.0] * 12]}},
    }.items():
        with pytest.raises(InvalidRequest) as refusal:
            ModelGradients(model, validate(ModelGradientsRequest, {"tokens": IDS} | request))
        assert refusal.value.param == param
    biased = validate(CompletionRequest, {"model": "pair", "prompt": IDS, "logit_bias": {"9": 1}})
    with pytest.raises(InvalidRequest, match="logit_bias: token 9 is out of range; there are 8"):
        plan_generation(model, biased)


@pytest.mark.parametrize(
    ("full", "limit"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 32),
        ({"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8}, 24),
        ({"rope_type": "default"}, 8),
    ],
)
def test_a_rotation_by_the_type_of_layers_is_stretched_too(full, limit):
    rotations = {"full_attention": full, "sliding_attention": {"rope_type": "default"}}
    parameters = {kind: {"rope_theta": 10000.0} | rotation for kind, rotation in rotations.items()}
    settings = {
        "max_position_embeddings": 8,
        "rope_parameters": parameters,
        "sliding_window": 4,
        "num_hidden_layers": 2,
    }
    settings["layer_types"] = ["sliding_attention", "full_attention"]
    model = LoadedModel("gemma3_text", tiny("gemma3_text", **settings).requires_grad_(False), tokenizer(), device())
    assert model_info(model)["max_length"] == limit
    text = [*range(3, 3 + limit)]
    found = forward_reply(model, ModelForwardRequest(tokens=text, return_=["logits"])).logits
    with torch.no_grad():
        near(found[0], tiny("gemma3_text", **settings)(torch.tensor([text])).logits[0, -1], 1e-4)


@pytest.mark.parametrize(
    ("rotation", "limit"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 32),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 32),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4}, 8),  # the config has it in both
        ({"rope_type": "dynamic", "factor": 4.0}, 8),
    ],
)
def test_a_stretched_rotation_has_more_positions(rotation, limit):
    own = tiny("llama", max_position_embeddings=8, rope_parameters={"rope_theta": 10000.0} | rotation)
    model = LoadedModel("llama", own.requires_grad_(False), tokenizer(), device())
    assert model_info(model)["max_length"] == limit
    if limit > 8:
        text = [*range(3, 3 + limit)]
        eagerly = tiny("llama", max_position_embeddings=8, rope_parameters={"rope_theta": 10000.0} | rotation)
        found = forward_reply(model, ModelForwardRequest(tokens=text, return_=["logits"])).logits
        with torch.no_grad():
            near(found, eagerly(input_ids=torch.tensor([text])).logits[0, -1:].numpy())
    with pytest.raises(InvalidRequest, match=f"positions for {limit}"):
        check_request(model, ModelForwardRequest(tokens=[3] * (limit + 1)))


def test_experts_compute_in_float64(tmp_path):
    eager("deepseek_v3").save_pretrained(tmp_path)
    model = LoadedModel.load(tmp_path, dtype="float64", device=torch.device("cpu"), progress=lambda _: None)
    request = ModelForwardRequest(tokens=IDS, return_=["logits"])
    found = forward_reply(model, request).logits
    assert found.dtype == np.float64
    near(found, forward_reply(loaded("deepseek_v3"), request).logits)


def test_a_decoder_beside_an_encoder_of_its_own_attention_is_named_so():
    """Else the keys of its layers would be labelled as the encoder's tokens."""
    config = LongT5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, encoder_attention_type="transient-global",
        decoder_start_token_id=0, **_SMALL,
    )  # fmt: skip
    model = LoadedModel("longt5", LongT5ForConditionalGeneration(config).eval(), tokenizer(), device())
    reply = forward_reply(model, ModelForwardRequest(text="the cat", target="die Katze", return_=["weights"]))
    assert [layer.layer for layer in reply.layers] == ["decoder.0", "cross.0"]
    for layer in reply.layers:
        queries, keys = reply.tokens_of(layer.layer)
        assert layer.weights.shape == (2, len(queries.tokens), len(keys.tokens))


def test_texts_of_a_batch_have_the_positions_that_they_have_alone():
    """RoBERTa counts positions from behind that of its padding."""
    config = RobertaConfig(
        **_BERT, vocab_size=12, pad_token_id=1, bos_token_id=0, eos_token_id=2, max_position_embeddings=32,
        is_decoder=True, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LoadedModel("roberta", RobertaForCausalLM(config).eval(), None, device())
    together = forward_reply(model, ModelForwardRequest(tokens=[IDS, IDS[:4]], return_=["logits"])).logits
    for text, logits in zip([IDS, IDS[:4]], together, strict=True):
        near(logits, forward_reply(model, ModelForwardRequest(tokens=text, return_=["logits"])).logits)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_position_embeddings": "512"}, "'max_position_embeddings': TypeError: .* expected int"),
        ({"intermediate_size": 8}, "asks for .*intermediate_size 8"),
        ({"num_attention_heads": 0}, "modulo by zero"),
        ({"pad_token_id": 999}, "Padding_idx"),
        ({"hidden_act": "nope"}, "KeyError 'nope'"),
    ],
)
def test_a_config_that_is_not_the_checkpoints_is_refused(change, says, tmp_path):
    eager("llama").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(InvalidCheckpoint, match=says):
        LoadedModel.load(tmp_path, dtype=None, device=torch.device("cpu"), progress=lambda _: None)


def test_a_config_without_an_entry_is_not_a_missing_one(tmp_path):
    eager("llama").save_pretrained(tmp_path / "net")
    (tmp_path / "net" / "config.json").write_text("{}")
    with pytest.raises(InvalidCheckpoint, match="an empty config"):
        find_folder(tmp_path, "net")


def test_a_padding_token_without_an_embedding_is_not_taken(tmp_path):
    eager("gpt2").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": 999}))
    model = LoadedModel.load(tmp_path, dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    request = ModelForwardRequest(tokens=[IDS, IDS[:3]], return_=["logits"])
    near(forward_reply(model, request).logits, forward_reply(loaded("gpt2"), request).logits)


def unknown_model_type(text):
    return json.dumps(json.loads(text) | {"model": {"type": "Unknown"}})


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("tokenizer.json", unknown_model_type, "Exception: data did not match"),  # of the package tokenizers
        ("tokenizer.json", lambda _: "{", "JSONDecodeError"),
        ("tokenizer_config.json", lambda _: "{", "JSONDecodeError"),
        ("tokenizer.json", None, "transformers reads the texts of this type by tokenizer.json or tokenizer.model"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named_and_tokens_are_read(file, change, says, tmp_path):
    eager("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    broken = tmp_path / file
    text = broken.read_text()
    broken.unlink() if change is None else broken.write_text(change(text))
    model = LoadedModel.load(tmp_path, dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    for fields in ({"text": "the cat"}, {"messages": [{"role": "user", "content": "the cat"}]}):
        with pytest.raises(InvalidRequest, match=r"has no tokenizer that can be read \(" + says) as fault:
            check_request(model, validate(ModelForwardRequest, fields))
        assert (fault.value.param, str(tmp_path) in fault.value.detail) == (next(iter(fields)), False)
    assert forward_reply(model, ModelForwardRequest(tokens=IDS)).labels.ids == IDS


def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path):
    eager("llama").save_pretrained(tmp_path)
    model = LoadedModel.load(tmp_path, dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    with pytest.raises(InvalidRequest, match="the checkpoint has no tokenizer; send tokens"):
        check_request(model, ModelForwardRequest(text="the cat"))


@pytest.mark.sampled(share=1, places=1)
@pytest.mark.parametrize(("share", "places"), [(0.6, "cpu, disk"), (8.0, "cpu")])
def test_a_model_that_is_partly_on_disk_gives_the_same_numbers(share, places, tmp_path):
    pytest.importorskip("accelerate")
    eager("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    options = {"dtype": None, "device": torch.device("cpu"), "progress": lambda _: None}
    budget = int(share * sum(each.nbytes for each in eager("llama").parameters()))
    model, whole = LoadedModel.load(tmp_path, free_bytes=budget, **options), LoadedModel.load(tmp_path, **options)
    assert model_info(model)["device"] == places
    assert model_info(model)["bytes"] == model_info(whole)["bytes"]
    request = ModelForwardRequest(tokens=IDS, return_=["logits", "weights"])
    ours, theirs = forward_reply(model, request), forward_reply(whole, request)
    # Rounding alone differs: a product by one row sums in another order where the matrix begins elsewhere in memory.
    near(ours.logits, theirs.logits)
    near(ours.layers[-1].weights, theirs.layers[-1].weights)
    gradients_request = ModelGradientsRequest(tokens=IDS, of={"token": 7})
    near(
        ModelGradients(model, gradients_request).reply().tokens,
        ModelGradients(whole, gradients_request).reply().tokens,
    )
    generating = validate(CompletionRequest, {"model": "m", "prompt": IDS, "max_tokens": 4, "temperature": 0})
    ended = [generate(each, generating, plan_generation(each, generating), lambda _: None) for each in (model, whole)]
    texts = [[choice["text"] for choice in each.last[-1]["choices"]] for each in ended]
    assert texts[0] == texts[1]
    if share < 1:
        more = [
            ModelCosts(each).memory.needed_bytes(check_request(each, gradients_request), gradients_request)
            for each in (model, whole)
        ]
        assert more[0] - more[1] == sum(each.nbytes for each in model.model.parameters() if each.is_meta) > 0
        with pytest.raises(InvalidRequest, match="on disk"):
            ModelGradients(model, gradients_request.model_copy(update={"check": True}))
        with pytest.raises(InvalidCheckpoint, match="too few for one layer"):
            LoadedModel.load(tmp_path, free_bytes=100, **options)


def test_the_tiles_of_a_gpu_are_estimated_there(monkeypatch):
    model, request = loaded("llama"), ModelWeightsRequest(tokens=IDS)

    def need():
        return ModelCosts(model).memory.needed_bytes(check_request(model, request), request)

    on_cpu = need()
    monkeypatch.setitem(vars(model.device), "is_cuda", True)
    assert need() - on_cpu == 7 * 2**20 * 8 * 4


@pytest.mark.parametrize("end", [-1, 99_999, [2, 99_999]])
def test_an_end_beyond_the_vocabulary_is_told_and_ends_nothing(end):
    model = LoadedModel("llama", tiny("llama").requires_grad_(False), tokenizer(), device())
    model.model.generation_config.eos_token_id = end
    unknown = end[-1] if isinstance(end, list) else end
    (told,) = [each for each in model_info(model)["left_out"] if each.startswith("eos_token_id")]
    assert told.startswith(f"eos_token_id {unknown} (the model predicts {model.reader.predictable} tokens")
    request = CompletionRequest(model="llama", prompt=[3, 4, 5], max_tokens=4, min_tokens=2)
    plan = plan_generation(model, request)
    assert plan.ends == ({2} if isinstance(end, list) else set())
    assert 2 <= generate(model, request, plan, lambda _: None).tokens <= 4
