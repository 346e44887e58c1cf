"""A text has the numbers in a batch of unequal lengths that it has alone, or that batch is refused by name."""

import copy
import warnings
from functools import lru_cache

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tools.models_walk.model_types import built, prepare, processor_of
from tools.models_walk.table_page import rows

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import AttentionPass

TEXTS = [[5, 3, 7, 8, 6, 4, 9, 10, 11], [3, 4, 5], [8], [9, 6, 3, 10, 4, 7, 5]]
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""The largest difference as a share of the largest number: that of docs/models.md for dtypes of two bytes."""
MIXED = {
    "convbert": "a convolution over tokens",
    "funnel": "layers that merge tokens",
    "mobilebert": "embeddings of neighbouring tokens",
    "nystromformer": "landmarks, the means of parts of a text",
    **dict.fromkeys(("deepseek_v4", "hy_v4"), "keys that stand for several tokens"),
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm5_next", "glm5_next_text", "glm_moe_dsa",
         "minimax_m3_vl", "minimax_m3_vl_text", "mistral_large4", "mistral_large4_text"),
        "an indexer that chooses keys",
    ),
}  # fmt: skip
"""The types whose texts padding changes."""
OVERFLOWS = {("longt5", torch.float16)}
"""The encoder of LongT5 adds the lowest number twice to padded keys."""
UNABLE = {
    "longformer": "its own code, to which the whole model is compared, does not run",
    "xlstm": "its code multiplies float32 by the dtype of the model, for one text alone too",
}
"""Types that do not run in dtypes of two bytes."""
KINDS = [kind for kind, row in rows("## The younger questions").items() if len(row) == 7 and kind != "type"]
KINDS += ["altclip", "chinese_clip", "clip"]
"""The types that read the tokens of a text."""
CASES = [
    (kind, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16) for kind in KINDS
    if dtype == torch.float32 or kind not in UNABLE
]  # fmt: skip
FEW = {
    "bloom": "ALiBi, by the mask",
    "mpt": "ALiBi, by the last key",
    "mistral": "a sliding window",
    "gpt2": "learned positions, filled up at the left",
    "bert": "learned positions, filled up at the right",
    "rwkv": "a running state",
    "whisper": "positions that no request gives",
    "trocr": "positions that no request gives",
    "t5": "an encoder and a decoder",
    "nystromformer": MIXED["nystromformer"],
}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@lru_cache(maxsize=1)
def plain(kind):
    return built(kind)


@pytest.fixture
def small():
    """Return a function that loads a small model of a type in a dtype."""
    opened = []

    def small(kind, dtype):
        model = copy.deepcopy(plain(kind)).to(dtype).requires_grad_(False)
        opened.append(LoadedModel(kind, model, tokenizer(), device(), processor_of(model)))
        return opened[-1]

    yield small
    for each in opened:
        each.close()


def outputs(loaded, tokens):
    """The output of each text in float64, without that of padding."""
    inputs = loaded.reader.read(ModelForwardRequest(tokens=tokens))
    with torch.no_grad():
        found = loaded.run(inputs.arguments, AttentionPass({}))[0].double()
    stack = inputs.predicted
    by_token = stack.mask is not None and found.shape[1] == stack.length
    return [row[stack.mask[at]] if by_token else row for at, row in enumerate(found)]


def assert_rows_are_those_of_alone(loaded, dtype):
    alone = [outputs(loaded, [text])[0] for text in TEXTS]
    for found, own in zip(outputs(loaded, TEXTS), alone, strict=True):
        assert own.isfinite().all()
        assert found.isfinite().all()
        assert found.shape == own.shape
        assert (found - own).abs().max() <= BOUNDS[dtype] * own.abs().max()


def check(loaded, kind, dtype):
    mixes = kind in MIXED or (kind, dtype) in OVERFLOWS
    assert loaded.reader.mixes_padding(len(TEXTS[0])) == mixes
    if not mixes:
        assert_rows_are_those_of_alone(loaded, dtype)
        return
    with pytest.raises(InvalidRequest, match="padding changes the numbers of a text") as fault:
        outputs(loaded, TEXTS)
    assert fault.value.param == "tokens"
    alike = [text[:7] for text in TEXTS if len(text) > 6]
    assert all(row.isfinite().all() for row in outputs(loaded, alike))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if dtype == torch.float64 or kind == "gpt2" else pytest.mark.slow)
        for kind in FEW
        for dtype in BOUNDS
    ],
)  # each kind where the bound is the tightest, and one in every dtype
def test_padding_leaves_a_few_types_their_numbers(small, kind, dtype):
    check(small(kind, dtype), kind, dtype)


@pytest.mark.parametrize("kind", ["axk2", "deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_that_chooses_every_key_takes_padded_texts(kind):
    model = built(kind, index_topk=len(TEXTS[0])).requires_grad_(False)
    loaded = LoadedModel(kind, model, tokenizer(), device())
    assert_rows_are_those_of_alone(loaded, torch.float32)
    with pytest.raises(InvalidRequest, match=r"beside one of more than 9 tokens.*one text a request"):
        outputs(loaded, [[*TEXTS[0], 3], TEXTS[1]])
    loaded.close()


@pytest.mark.sampled(kind=6)
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_padding_leaves_each_type_its_numbers_or_is_refused(small, kind, dtype):
    check(small(kind, dtype), kind, dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["bloom", "mpt", "mistral", "bert", "whisper", "t5"])
def test_padding_leaves_gradients_what_they_are_alone(small, kind, dtype):
    loaded = small(kind, dtype)
    request = {"wrt": ["embeddings"], "of": {"position": -1, "token": 7}}

    def gradients(tokens):
        reply = ModelGradients(loaded, validate(ModelGradientsRequest, {"tokens": tokens, **request})).reply()
        return np.asarray(reply.embeddings, np.float64)

    together = gradients(TEXTS)
    for found, text in zip(together, TEXTS, strict=True):
        own = gradients(text)
        real = found[-len(text) :] if loaded.reader.pads_left else found[: len(text)]
        np.testing.assert_allclose(real, own, atol=BOUNDS[dtype] * np.abs(own).max())
