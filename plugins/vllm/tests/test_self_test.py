"""The self-test of a real engine: where it fails, every ask is refused with the reason, and vLLM serves on."""

import numpy as np
import pytest
import torch

from attention_vllm.page_layouts import TokensLast
from attention_vllm.worker_process import OBSERVER
from conftest import texts

LOOK = {"weights": True, "statistics": []}


@pytest.mark.parametrize("fault", ["values", "raises"])
def test_a_fault_in_the_reading_of_pages_refuses_every_ask(engine, monkeypatch, fault):
    (prompt,) = texts(3, 1, 30, 30)
    (plain,), _ = engine("grouped", block_size=32, observing=False).run([prompt], [None], 5)
    read = TokensLast.values

    def broken(self, pages):
        if fault == "raises":
            raise IndexError("no such page")
        return read(self, pages).roll(1, 2)

    monkeypatch.setattr(TokensLast, "values", broken)
    own = engine("grouped", block_size=32)
    reason = "depart from the kernel's output" if fault == "values" else "no such page"
    assert reason in OBSERVER.refusal
    (tokens,), ((result,),) = own.run([prompt], [LOOK], 5)
    assert tokens == plain
    assert result["refused"]["param"] == "attention"
    assert reason in result["refused"]["detail"]


def test_half_types_are_told_of_or_refused_by_the_name_of_their_kernel(engine, reference):
    (prompt,) = texts(4, 1, 20, 20)
    own = engine("normed", block_size=32, dtype="bfloat16")
    (tokens,), (results,) = own.run([prompt], [LOOK], 3)
    if OBSERVER.refusal is not None:
        assert "packed for the kernel 'amx'" in OBSERVER.refusal
        assert torch.cpu._is_amx_tile_supported()
        return
    attentions, _ = reference("normed", prompt + tokens)
    for each in results:
        for fields in each["layers"]:
            exact = attentions[fields["layer"]][:, each["position"] - 1, : each["position"]]
            np.testing.assert_allclose(fields["weights"], exact, atol=5e-2)
