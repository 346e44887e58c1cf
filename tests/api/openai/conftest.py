"""A live server with a small model that talks and one that embeds."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.conftest import live_server

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


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


@pytest.fixture(scope="package")
def door(tmp_path_factory):
    """The address of the server."""
    with live_server(fill(tmp_path_factory.mktemp("models"))) as url:
        yield url
