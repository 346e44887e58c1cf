"""The memory that admission holds for a request is that which ``/complexity`` prints for it."""

import json
from functools import cache

import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.inputs.images import small_encoders, small_prompts
from tests.models.inputs.images.small_encoders import noise, sent
from tests.models.small_models import device, loaded
from tools.models_walk.model_types import built
from torch.utils.flop_counter import FlopCounterMode

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, ModelComplexityRequest
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.generation.decoding.decoder import Decoder
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
