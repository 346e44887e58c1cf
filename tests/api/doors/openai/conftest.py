"""A live server with a small model that talks and one that embeds, and keys of its callers."""

from typing import NamedTuple

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attention_contract.schemas.server import CallerLimits
from attention_service.api.access.api_keys import create_key
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.conftest import live_server

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if mood %}{{ mood }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def letters():
    """Return a tokenizer of single characters, with a chat template."""
    known = {chr(code): code - 33 for code in range(33, 127)} | {"Ġ": 94, "Ċ": 95}
    made = Tokenizer(models.BPE(known, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE)


def talker():
    """Return a small model with random parameters whose every token is a character, and none its end."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, num_key_value_heads=2, initializer_range=0.5, **sizes, **ends)
    return LlamaForCausalLM(config).eval()


def fill(root):
    """Put both models into a model repository."""
    talker().save_pretrained(root / "talker")
    letters().save_pretrained(root / "talker")
    tiny("bert").save_pretrained(root / "encoder")
    tokenizer().save_pretrained(root / "encoder")
    return root


class Door(NamedTuple):
    """The address of the server, and keys to it: one that may do all, and others of one scope or with a limit."""

    url: str
    key: str
    reader: str
    one_at_a_time: str
    of_little_time: str


@pytest.fixture(scope="package")
def door(tmp_path_factory):
    """The server: all share it, for a model takes seconds to load."""
    root = fill(tmp_path_factory.mktemp("models"))
    keys = (
        create_key(root, "app", ["infer", "inspect", "manage", "metrics"]),
        create_key(root, "reader", ["inspect"]),
        create_key(root, "single", ["infer"], CallerLimits(concurrent=1)),
        create_key(root, "brief", ["infer"], CallerLimits(device_ms_per_s=1)),
    )
    with live_server(root, require_keys=True) as url:
        yield Door(url, *keys)


@pytest.fixture
def http(door):
    """A client with the key that may do all."""
    with httpx.Client(base_url=door.url, timeout=60, headers={"authorization": f"Bearer {door.key}"}) as client:
        yield client
