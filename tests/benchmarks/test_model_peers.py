"""What the plain servers around transformers answer, beside which whole models are measured."""

import base64

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.model_peers.servers import Start, peers
from benchmarks.model_peers.transformers_answers import Model
from transformers import AutoModelForCausalLM, LlamaConfig

TEXTS = [[5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, bos_token_id=None, eos_token_id=None, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    return made


def test_answers_of_a_batch_are_those_of_each_text(folder):
    model = Model(str(folder), torch.get_num_threads())
    together = model.generated(TEXTS, 4), model.weights(TEXTS)
    alone = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for text, made, found in zip(TEXTS, *together, strict=True):
        ids = torch.tensor([text])
        expected = alone.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, len(text) :]
        assert made == expected.tolist()
        weights = torch.cat(alone(ids, output_attentions=True).attentions).detach()
        raw = np.frombuffer(base64.b64decode(found["weights"]), np.float32).reshape(weights.shape)
        np.testing.assert_allclose(raw, weights, atol=1e-6)
        np.testing.assert_allclose(found["entropy"], torch.special.entr(weights).sum(-1).mean(-1), atol=1e-5)


def test_each_server_is_measured_with_what_it_returns(folder):
    for peer in peers(folder):
        path, body = peer.generate([300, 301], 8)
        assert path.startswith("/")
        assert body.get("max_tokens", body.get("max_new_tokens")) == 8
        assert len(peer.returns.split()) == 6
        assert (peer.returns.split()[0] == "yes") == (peer.weights is not None)
    assert Start(folder, 80, 1).arguments == [str(folder), "80", "1"]
