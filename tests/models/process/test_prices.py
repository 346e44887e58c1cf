"""The memory that admission holds for a request is that which ``/complexity`` prints for it."""

import json
from functools import cache

import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.cost.peaks import peaks
from tests.models.inputs.images import small_encoders, small_prompts
from tests.models.inputs.images.small_encoders import noise, sent
from tests.models.small_models import PAIRS, device, eager, loaded
from tools.models_walk.model_types import built
from torch.utils.flop_counter import FlopCounterMode

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, ModelComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.pass_memory import bias_bytes
from attention_service.models.costs.question_stages import input_stage
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.model_operations import OPERATIONS, prepare
from attention_service.models.process.priced_questions import AskedModel
from attention_service.models.process.served import PricedRun

FACTS = {"free_bytes": 2**34, "reader": "", "form": "application/json", "encoding": "list"}
WORDS = {"text": "the cat sat on the mat", "images": "what is on the mat"}
SIZE = (60, 44)
SWEEP = {"over": ["layers", "heads"], "set": 0}
PATHS = {"from": {"parts": ["heads", "mlps"]}, "to": {"parts": ["q", "mlps"]}}
SOURCES = {"text": "the cat sat on\nthe dog on mat\nthe mat", "answer": "\nthe dog sat"}
CASES = {
    "forward": ("forward", {}, {}, "prefill"),
    "weights": ("weights", {}, {"weights": True}, "prefill"),
    "effects of weights": ("effects", {"sweep": SWEEP | {"tap": "weights"}}, None, "sweep"),
    "effects of contexts": ("effects", {"sweep": SWEEP | {"tap": "context"}}, None, "sweep"),
    "paths": ("effects", PATHS, None, "sweep"),
    "lens": ("lens", {"of": ["hidden", "heads"]}, {"lens": ["hidden", "heads"]}, "lens"),
    "context": ("context", SOURCES | {"return": ["attention", "gradient", "hidden", "removed"]}, None, "context"),
}
"""An operation, the fields of a request, those of a question about its cost if they are others, and where that is."""
ELSEWHERE = {
    "jacobian": "a part of a fit, in test_fit_prices.py", "features": "likewise", "states": "likewise",
    "complexity": "its own price",
    "complete": "a test of its own", "chat": "as complete does", "respond": "as complete does",
    "transcribe": "generates from a sound, whose length no field tells",
}  # fmt: skip
NO_FIELD = {"gradients", "embed", "rerank", "score", "similarity", "tokenize", "adapt", "forget"}
"""Operations whose cost no field of a request asks for."""
MODELS = ("llama", "gpt2", "bert", "deepseek_v3", "bloom", "mamba2", "qwen3_next", "llava", "qwen2_5_vl", "vit")


@cache
def model(kind):
    if kind in {"bloom", "mamba2", "qwen3_next"}:
        return LoadedModel(kind, built(kind).requires_grad_(False), tokenizer(), device())
    if kind == "vit":
        return small_encoders.loaded(kind)
    return small_prompts.loaded(kind) if kind in {"llava", "qwen2_5_vl"} else loaded(kind)


def first_work(asked, operation, fields):
    body = memoryview(json.dumps(fields, default=lambda image: image.model_dump(mode="json")).encode())
    return prepare(asked, operation, body, FACTS, lambda _: None)


def admitted(asked, operation, fields):
    """The most that is held for a request before its first pass."""
    work = first_work(asked, operation, fields)
    need = work.needed_bytes
    while work.question is None and isinstance(work := work.run(), PricedRun):
        need = max(need, work.needed_bytes)
    return need


def inputs(kind):
    """The input of a request, and its sizes."""
    images = {"llava", "qwen2_5_vl", "vit"}
    own, sizes = {}, {}
    if kind in images:
        own, sizes = {"images": [sent(noise(*SIZE))]}, {"images": [{"width": SIZE[0], "height": SIZE[1]}]}
    if kind != "vit":
        text = WORDS["images" if kind in images else "text"]
        own, sizes = own | {"text": text}, sizes | {"length": len(text.split())}
    return own, sizes


def test_every_operation_is_priced_or_said_not_to_be():
    assert {case[0] for case in CASES.values()} | {*ELSEWHERE} | NO_FIELD == {*OPERATIONS}
    assert not NO_FIELD & {*ModelComplexityRequest.model_fields, *ModelComplexityReply.model_fields}


@pytest.mark.sampled(case=4, kind=4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", MODELS)
def test_the_memory_that_is_held_is_the_memory_that_is_told(kind, case):
    operation, fields, asks, part = CASES[case]
    asked, (own, sizes) = AskedModel(model(kind), Decoder(model(kind))), inputs(kind)
    asks = fields if asks is None else asks
    request = fields if part == "context" else own | fields
    try:
        if operation == "lens" or "from" in fields:
            asked.stream()  # of short texts, once for a model
        need = admitted(asked, operation, request)
    except InvalidRequest as refusal:
        pytest.skip(f"the model does not answer it: {refusal.detail}")
    reply = first_work(asked, "complexity", asks if part == "context" else sizes | asks).run().reply
    decoding = reply.prefill.peak_bytes if kind == "vit" and part == "sweep" else 0
    assert max(getattr(reply, part).peak_bytes, decoding) == need


def test_a_model_that_makes_every_row_of_logits_is_priced_with_all_of_them():
    eager, length = built("bert"), 20
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        eager(torch.ones(1, length, dtype=torch.int64))
    found = LoadedModel("bert", built("bert").requires_grad_(False), tokenizer(), device())
    price = ModelCosts(found).report(ModelComplexityRequest(length=length), 2**34).prefill
    assert price.flops == counter.get_total_flops()


@pytest.mark.parametrize(("length", "target"), [(20, 3), (20, None), (7, 12), (5, 1)])
@pytest.mark.parametrize("kind", PAIRS)
def test_a_target_is_priced_by_its_own_tokens(kind, length, target):
    """PyTorch's counter counts the pairs that the causal mask forbids too."""
    found, own = loaded(kind), target or length
    ids = {"input_ids": torch.ones(2, length).long(), "decoder_input_ids": torch.ones(2, own).long()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        eager(kind)(**ids, use_cache=False)
    causal = [place.widths for place in found.places.values() if place.keys == "target"]
    unseen = sum(widths.heads * (widths.head_dim + widths.value_dim) for widths in causal) * own * (own - 1) // 2
    request = ModelComplexityRequest(batch=2, length=length, target_length=target)
    price = ModelCosts(found).report(request, 2**34).prefill
    assert price.flops == counter.get_total_flops() - 2 * 2 * unseen


@pytest.mark.parametrize("kind", PAIRS)
def test_a_request_with_a_target_is_priced_as_it_is_told(kind):
    asked = AskedModel(loaded(kind), Decoder(loaded(kind)))
    request = {"text": "the cat sat on the mat", "target": "the dog"}
    checked = check_request(loaded(kind), ModelForwardRequest(**request))
    stage = input_stage(asked.costs.memory, checked, ModelForwardRequest(**request))
    assert stage.target == checked.inputs.target.length < stage.length
    sizes = {"length": stage.length, "target_length": stage.target}
    assert asked.costs.report(ModelComplexityRequest(**sizes), 2**34).prefill.flops == asked.costs.work(stage).flops


@pytest.mark.parametrize("kind", PAIRS)
def test_a_step_of_a_generation_runs_the_decoder_alone(kind):
    """It writes a token behind the start token, and reads the keys of the encoder's tokens, which are cached."""
    price = ModelCosts(loaded(kind)).report(ModelComplexityRequest(length=20, new_tokens=1), 2**34)
    model, text = eager(kind), torch.ones(1, 20).long()
    with torch.no_grad():
        first = model(input_ids=text, decoder_input_ids=text[:, :1], use_cache=True)
        read = (first.encoder_last_hidden_state,)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(encoder_outputs=read, decoder_input_ids=text[:, :1], past_key_values=first.past_key_values)
    assert price.per_token.flops == counter.get_total_flops()
    assert price.prefill.flops > price.per_token.flops


@pytest.mark.parametrize("batch", [1, 3])
def test_the_biases_of_long_texts_are_held_for(batch):
    """Those of each head, query and key of T5, made from buckets, and with the padding of each text."""
    found, length = loaded("t5"), 400
    (first, *_) = [place for place in found.places.values() if place.biased]
    padding = torch.zeros(batch, 1, 1, length)

    @torch.no_grad()
    def biases():
        return first.module.compute_bias(length, length) + padding

    (held,) = peaks([biases])
    assert 0.8 * held < bias_bytes(found, batch, length, length) < 2 * held
    assert not bias_bytes(loaded("bart"), batch, length, length)
    price = ModelCosts(found).report(ModelComplexityRequest(batch=batch, length=length), 2**34)
    assert price.prefill.peak_bytes > held


def test_a_length_of_a_target_is_refused_by_a_model_without_one():
    with pytest.raises(InvalidRequest, match="no decoder beside an encoder") as refused:
        ModelCosts(loaded("llama")).report(ModelComplexityRequest(target_length=3), 2**34)
    assert refused.value.param == "target_length"


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in {"bert", "vit"}])
def test_a_generation_is_told_as_it_is_held(kind, alone):
    asked = AskedModel(model(kind), Decoder(model(kind)))
    request = {"model": "m", "prompt": ["the cat sat"] * 3, "max_tokens": 40, "temperature": 0, "alone": alone}
    need = first_work(asked, "complete", request).needed_bytes
    price = first_work(asked, "complexity", {"length": 3, "batch": 3, "new_tokens": 40, "alone": alone}).run().reply
    assert price.prefill.peak_bytes + price.cache_bytes == need
    costs = asked.costs
    largest = costs.report(ModelComplexityRequest(length=3, batch=3, new_tokens=40, alone=alone), need)
    assert largest.max_batch == 3, "a request of exactly the size that fits is admitted"
