"""What images are said to cost is what the same images take: their tokens, products, plans and memory."""

import numpy as np
import pytest
import torch
from PIL import Image
from tests.cost.peaks import peaks
from tests.models.inputs.images import small_encoders, small_prompts
from tests.models.inputs.images.small_encoders import ENCODERS, noise, sent
from tests.models.inputs.images.small_prompts import PROMPTS
from torch.utils.flop_counter import FlopCounterMode

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.inputs.images.image_decoding import decoding_bytes
from attention_service.models.loaded.checked_request import check_request

pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")  # of PaliGemma's processor
TEXT = "what is on the mat"
SIZES = [(60, 44), (40, 72)]
FREE_BYTES = 2**34
SLACK = 2**25 + 2**20
"""Bytes that weights are inspected in, whatever the size, and some that states take, or decoding."""


def sized(*sizes, **options):
    return ModelComplexityRequest(images=[{"width": width, "height": height} for width, height in sizes], **options)


def planned(model, request):
    """Return the plan of a real request, as the model's process makes it."""
    decoding = decoding_bytes(request.images, model.reader.edge) if request.images else 0
    return max(decoding, ModelCosts(model).memory.needed_bytes(check_request(model, request), request))


def eager_flops(model, arguments):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**arguments)
    return counter.get_total_flops()


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", PROMPTS)
def test_an_image_has_the_tokens_of_a_real_prompt(kind):
    model = small_prompts.loaded(kind)
    text = len(forward_reply(model, ModelForwardRequest(text=TEXT)).labels.tokens)
    estimate = ModelCosts(model).report(sized(*SIZES, length=text), FREE_BYTES)
    for size, image in zip(SIZES, estimate.images, strict=True):
        reply = forward_reply(model, ModelForwardRequest(text=TEXT, images=[sent(noise(*size))]))
        assert len(reply.labels.tokens) == text + image.tokens
        assert sum(len(each.tokens) for each in reply.image_labels) == image.vision_tokens
        assert len(reply.image_labels) == image.crops
    assert estimate.cache_bytes == estimate.cache_bytes_per_token * (
        text + sum(image.tokens for image in estimate.images)
    )


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", PROMPTS)
def test_the_products_of_a_prompt_are_those_of_its_eager_self(kind):
    model, size = small_prompts.loaded(kind), SIZES[0]
    estimate = ModelCosts(model).report(sized(size, length=5), FREE_BYTES)
    made = small_prompts.processor(kind)(
        text=[model.reader.before + TEXT], images=[Image.fromarray(noise(*size))], return_tensors="pt",
        return_mm_token_type_ids=True,
    )  # fmt: skip
    arguments = {name: x for name, x in made.items() if name in model.reader.names - {"labels"}}
    length = made["input_ids"].shape[1]
    found = eager_flops(small_prompts.eager(kind), arguments | {"logits_to_keep": 1})
    text = model.places["0"]
    pairs = length * (length - 1) // 2 if text.spec.masks else 0  # that the causal mask forbids
    forbidden = 4 * 2 * text.widths.heads * text.widths.head_dim * pairs
    assert estimate.prefill.flops == pytest.approx(found - forbidden, rel=0.01)
    assert estimate.vision.flops < estimate.prefill.flops
    assert estimate.vision.bytes < estimate.prefill.bytes <= estimate.parameter_bytes + estimate.cache_bytes
    assert estimate.vision.predicted_ms < estimate.prefill.predicted_ms


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", ENCODERS)
def test_the_products_of_a_batch_are_those_of_an_eager_encoder(kind):
    model = small_encoders.loaded(kind)
    estimate = ModelCosts(model).report(sized((96, 64), batch=3), FREE_BYTES)
    made = small_encoders.processor(kind)(images=[Image.fromarray(noise())] * 3, return_tensors="pt")
    if "pixel_attention_mask" in made:
        longest = int(made["pixel_attention_mask"].sum(1).max())
        made |= {name: made[name][:, :longest] for name in ("pixel_values", "pixel_attention_mask")}
    assert estimate.prefill.flops == pytest.approx(eager_flops(small_encoders.eager(kind), made), rel=0.01)
    assert estimate.vision == estimate.prefill
    assert estimate.images[0].tokens == len(
        forward_reply(model, ModelForwardRequest(images=[sent(noise())])).labels.tokens
    )
    assert (estimate.cache_bytes, estimate.per_token.flops) == (0, 0)


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "vit"])
@pytest.mark.parametrize("weights", [False, True])
def test_the_estimated_memory_is_that_of_a_real_plan_and_holds_what_a_pass_allocates(kind, weights):
    model = (small_encoders if kind == "vit" else small_prompts).loaded(kind)
    images, size = 2, (160, 160)
    words = {} if kind == "vit" else {"text": TEXT}
    request = (ModelWeightsRequest if weights else ModelForwardRequest)(
        images=[sent(noise(*size)) for _ in range(images)], **words
    )
    estimate = ModelCosts(model).report(sized(*[size] * images, length=5, weights=weights), FREE_BYTES)
    plan = planned(model, request)
    assert plan <= estimate.prefill.peak_bytes <= max(1.3 * plan, plan + 2**20)
    read = check_request(model, request)
    reply = (weights_reply if weights else forward_reply)(model, request, read)
    [held] = peaks([lambda: (weights_reply if weights else forward_reply)(model, request, read)])
    held += 2 * sum(layer.weights.nbytes for layer in reply.layers)  # the reply: in this process and in the server's
    assert held <= estimate.prefill.peak_bytes <= 1.3 * held + SLACK


@pytest.mark.slow
def test_what_fits_shrinks_with_images_and_what_they_take_to_decode_counts():
    costs = ModelCosts(small_prompts.loaded("qwen2_5_vl"))
    plain, shown = (costs.report(sized(*sizes, length=8), 2**28) for sizes in ([], [(64, 64)] * 3))
    assert shown.max_batch < plain.max_batch
    assert shown.max_length < plain.max_length
    assert costs.report(sized((4000, 3000), length=8), FREE_BYTES).prefill.peak_bytes >= 4000 * 3000 * 32
    encoder = ModelCosts(small_encoders.loaded("vit"))
    once, thrice = (encoder.report(sized((64, 64), (32, 32), batch=batch), 2**28) for batch in (1, 3))
    assert thrice.prefill.flops == 3 * once.prefill.flops
    assert once.max_batch == thrice.max_batch > 100
    assert once.max_length == 17


@pytest.mark.sampled(request_=2, param=2)
@pytest.mark.parametrize(
    ("model", "request_", "param"),
    [
        ("vit", sized(), "images"),
        ("vit", sized((32, 32), new_tokens=3), "new_tokens"),
        ("llava", sized((32, 32), (2**13, 2**13)), "images.1"),
        ("llava", sized((2**14, 1)), None),
    ],
)
def test_what_has_no_cost_is_named(model, request_, param):
    costs = ModelCosts((small_encoders if model == "vit" else small_prompts).loaded(model))
    if param is None:
        assert np.isfinite(costs.report(request_, FREE_BYTES).prefill.predicted_ms)
        return
    with pytest.raises(InvalidRequest) as fault:
        costs.report(request_, FREE_BYTES)
    assert fault.value.param == param
