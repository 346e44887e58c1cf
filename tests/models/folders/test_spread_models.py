"""The models that are refused on several devices, by their files alone."""

from pathlib import Path

import pytest

from attention_service.models.folders.model_catalogue import PROCESS_BYTES, ModelFolder
from attention_service.models.folders.spread_models import SPREAD_TYPES, bytes_on_all, spread_refusal
from attention_service.modules.checkpoints.forms.form import Facts, Form

LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}
GPT_OSS = {
    "model_type": "gpt_oss", "num_attention_heads": 3, "num_local_experts": 4, "num_hidden_layers": 2,
    "hidden_size": 10, "intermediate_size": 20,
}  # fmt: skip


@pytest.mark.parametrize("devices", [2, 4])
def test_heads_that_divide_are_spread(devices):
    assert spread_refusal(Facts(LLAMA), devices) is None


@pytest.mark.parametrize(
    ("facts", "devices", "said"),
    [
        (Facts(LLAMA), 8, "its 4 heads of keys and values do not divide by 8 devices"),
        (Facts(LLAMA), 3, "its 8 heads do not divide by 3 devices"),
        (Facts(LLAMA, packed="GPTQ int4"), 2, "GPTQ int4"),
        (Facts(LLAMA, library="timm"), 2, "timm"),
        (Facts({"model_type": "gpt2", "n_head": 4}), 2, "gpt2"),
        (Facts({}), 2, "None"),
        (Facts({"model_type": "gemma3n_text", "num_attention_heads": 8}), 2, "gemma3n_text"),
        (Facts({"model_type": "llama", "text_config": {"num_attention_heads": 3}}), 2, "its 3 heads"),
        (Facts(GPT_OSS), 3, "its 4 experts do not divide by 3 devices"),
    ],
)
def test_others_are_refused_by_what_they_are(facts, devices, said):
    assert said in spread_refusal(facts, devices)


def test_the_experts_are_divided_where_there_is_no_plan_for_heads():
    assert spread_refusal(Facts(GPT_OSS), 2) is None
    experts, others = 3 * 4 * 2 * 4 * 10 * 20, 1000  # of width 4
    assert bytes_on_all(Facts(GPT_OSS), experts + others, 4, 3) == experts + 3 * others
    assert bytes_on_all(Facts(GPT_OSS | {"hidden_size": "ten"}), 500, 4, 3) == 1500
    assert bytes_on_all(Facts(LLAMA), 500, 4, 3) == 500


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_devices_with_memory_of_their_own_take_their_parts_alone(devices):
    size = 10**12
    folder = ModelFolder("a", Path("a"), Form(Facts(LLAMA)), 0, size, size, None)
    for estimate, copies in ((folder.resident_bytes, 1), (folder.loading_bytes, 2)):
        shared, own = (estimate(None, devices, apart=apart) for apart in (False, True))
        assert shared == devices * PROCESS_BYTES + copies * size
        assert own == PROCESS_BYTES + copies * size // devices


def test_every_type_that_is_spread_is_one_of_transformers():
    assert {*pytest.importorskip("transformers").CONFIG_MAPPING} >= SPREAD_TYPES
