"""Two ranks of tensor parallelism: each tells of its own heads, and the reply has those of the model."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from attention_client import Client
from conftest import serving, statistics_of

LOOK = {"weights": True, "top_k": 2, "statistics": ["entropy", "max_weight"]}
OPTIONS = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
PROMPTS = [[5 + n, *range(10, 14 + 9 * n)] for n in range(4)]


@pytest.fixture(scope="module")
def url(served_model):
    with serving(served_model, "--tensor-parallel-size", "2") as address:
        yield address


def test_the_heads_of_both_ranks_are_those_of_transformers(url, reference):
    with Client(url) as client:
        for prompt in PROMPTS:
            (choice,) = client.models.generate("m", prompt, **OPTIONS, attention=LOOK).choices
            attentions, _ = reference("served", prompt + [token.id for token in choice.attention])
            assert len(choice.attention) == 10
            for token in choice.attention:
                for layer in token.layers:
                    exact = attentions[layer.layer][:, token.position - 1, : token.position]
                    np.testing.assert_allclose(np.asarray(layer.weights), exact, atol=1e-4)
                    for name in ("entropy", "max_weight"):
                        numbers = np.asarray(getattr(layer.statistics, name))
                        np.testing.assert_allclose(numbers, statistics_of(exact)[name], atol=2e-4)


def test_heads_come_in_the_order_asked(url, reference):
    ask = {"heads": [6, 1, 3], "layers": [2], "weights": True, "statistics": []}
    with Client(url) as client:
        (choice,) = client.models.generate("m", PROMPTS[1], **OPTIONS, attention=ask).choices
    attentions, _ = reference("served", PROMPTS[1] + [token.id for token in choice.attention])
    for token in choice.attention:
        exact = attentions[2][[6, 1, 3], token.position - 1, : token.position]
        np.testing.assert_allclose(np.asarray(token.layers[0].weights), exact, atol=1e-4)


@pytest.mark.parametrize("tap", ["context", "output"])
def test_edits_name_heads_of_the_model(url, served_model, tap):
    heads = [1, 6]
    edit = {"tap": "context", "heads": heads, "set": 0} if tap == "context" else {"tap": "output", "scale": 0.5}
    with Client(url) as client:
        (choice,) = client.models.generate(
            "m", PROMPTS[2], **OPTIONS, attention=LOOK | {"edits": {"1": [edit]}}
        ).choices
    model = AutoModelForCausalLM.from_pretrained(served_model, attn_implementation="eager", dtype=torch.float64).eval()
    projection = model.model.layers[1].self_attn.o_proj

    def edited_context(_, given):
        context = given[0].clone().unflatten(-1, (8, -1))
        context[..., heads, :] = 0
        return context.flatten(-2)

    if tap == "context":
        projection.register_forward_pre_hook(edited_context)
    else:
        projection.register_forward_hook(lambda _, __, output: output * 0.5)
    tokens = [token.id for token in choice.attention]
    with torch.inference_mode():
        out = model(torch.tensor([PROMPTS[2] + tokens]), output_attentions=True, use_cache=False)
    assert out.logits[0, len(PROMPTS[2]) - 1 : -1].argmax(-1).tolist() == tokens
    for token in choice.attention:
        for layer in token.layers:
            exact = out.attentions[layer.layer][0, :, token.position - 1, : token.position].numpy()
            np.testing.assert_allclose(np.asarray(layer.weights), exact, atol=1e-4)


def test_a_refusal_of_both_ranks_is_one(url):
    with Client(url) as client:
        with pytest.raises(Exception, match="layers among") as caught:
            client.models.generate("m", [5, 6, 7], attention={"layers": [9]})
        assert caught.value.param == "attention.layers"
        assert client.models.generate("m", [5, 6, 7], max_tokens=2, attention={"layers": [0]}).choices[0].attention
