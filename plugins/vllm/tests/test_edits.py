"""Edits of one request among 16, beside transformers with the same edit; the others, bit by bit."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from conftest import texts

NEW, ONE, LAYER, HEAD = 12, 5, 1, 2
LOOK = {"weights": True, "statistics": ["entropy"]}
EDITS = {
    "context": {"tap": "context", "heads": [HEAD], "set": 0},
    "weights": {"tap": "weights", "heads": [HEAD], "keys": [0], "set": 0, "renormalize": True},
    "scores": {"tap": "scores", "heads": [HEAD], "keys": [1, 2], "add": -3.5},
    "v": {"tap": "v", "heads": [1], "scale": 0.5},
    "output": {"tap": "output", "add": [0.01 * at for at in range(256)]},
}


def edited_attention(kind):
    """Eager attention of transformers with the edit of this kind, by its definition."""

    def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **options):
        own = module.layer_idx == LAYER
        if own and kind == "v":
            value = value.clone()
            value[:, 1] *= 0.5
        keys, values = (modeling_llama.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
        scores = query @ keys.transpose(2, 3) * scaling
        if own and kind == "scores":
            scores[:, HEAD, :, 1:3] -= 3.5
        weights = (scores + attention_mask).softmax(-1)
        if own and kind == "weights":
            weights[:, HEAD, :, 0] = 0
            weights[:, HEAD] /= weights[:, HEAD].sum(-1, keepdim=True).clamp_min(1e-30)
        context = weights @ values
        if own and kind == "context":
            context[:, HEAD] = 0
        return context.transpose(1, 2).contiguous(), weights

    return attend


def by_place(own):
    return {(each["position"], fields["layer"]): fields["weights"] for each in own for fields in each["layers"]}


def test_an_edit_changes_one_request_as_transformers_would_and_no_bit_of_the_others(engine, checkpoints, monkeypatch):
    prompts = texts(11, 16, 5, 60)
    own = engine("grouped", max_num_batched_tokens=256, block_size=32)
    plain = own.run(prompts, [LOOK] * 16, NEW, salts=["plain"] * 16)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoints / "grouped", attn_implementation="eager", dtype=torch.float64
    )
    for kind, edit in EDITS.items():
        asks = [LOOK | ({"edits": {str(LAYER): [edit]}} if n == ONE else {}) for n in range(16)]
        tokens, results = own.run(prompts, asks, NEW, salts=[f"{kind} {n}" for n in range(16)])
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(modeling_llama, "eager_attention_forward", edited_attention(kind))
            if kind == "output":
                added = torch.tensor(edit["add"], dtype=torch.float64)
                hook = model.model.layers[LAYER].self_attn.o_proj.register_forward_hook(lambda _, __, x: x + added)  # noqa: B023
            out = model.eval()(torch.tensor([prompts[ONE] + tokens[ONE]]), output_attentions=True, use_cache=False)
        if kind == "output":
            hook.remove()
        assert out.logits[0, len(prompts[ONE]) - 1 : -1].argmax(-1).tolist() == tokens[ONE]
        edited = by_place(results[ONE])
        assert len(edited) == NEW * 4
        for (position, layer), weights in edited.items():
            exact = out.attentions[layer][0, :, position - 1, :position].numpy()
            np.testing.assert_allclose(weights, exact, atol=1e-4, err_msg=f"{kind} {position} {layer}")
        changed = by_place(plain[1][ONE])
        assert any(not np.array_equal(edited[at], changed[at]) for at in edited.keys() & changed.keys())
        for n in {*range(16)} - {ONE}:
            assert tokens[n] == plain[0][n]
            mine, theirs = by_place(results[n]), by_place(plain[1][n])
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(mine[at], theirs[at]) for at in mine)


def test_edits_of_the_answer_leave_the_prompt_as_it_is(engine, reference):
    (prompt,) = texts(12, 1, 30, 30)
    own = engine("grouped", block_size=32)
    edit = {"from": "answer", "edits": {str(LAYER): [{"tap": "context", "set": 0}]}}
    (tokens,), (results,) = own.run([prompt], [LOOK | edit], 4, salts=["answer"])
    (plain,), (before,) = own.run([prompt], [LOOK], 4, salts=["none"])
    first, second = by_place(results), by_place(before)
    at = len(prompt)
    assert tokens[0] == plain[0]
    assert all(np.array_equal(first[at, layer], second[at, layer]) for layer in range(4))
    assert not np.array_equal(first[at + 1, 3], second[at + 1, 3])


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        ({"layers": [7]}, "attention.layers"),
        ({"heads": [8]}, "attention.heads"),
        ({"statistics": ["alignment"]}, "attention.statistics.0"),
        ({"keep": True}, "attention.keep"),
        ({"edits": {"1": [{"tap": "mlp", "set": 0}]}}, "attention.edits.1.0.tap"),
        ({"edits": {"1": [{"tap": "v", "heads": [2], "set": 0}]}}, "attention.edits.1.0.heads"),
    ],
)
def test_what_is_not_answered_is_refused_by_its_field_while_vllm_serves_on(engine, ask, param):
    own = engine("grouped", block_size=32)
    (tokens,), (results,) = own.run([[5, 6, 7]], [ask], 3, salts=["own"])
    assert len(tokens) == 3
    assert [each["refused"]["param"] for each in results] == [param]
