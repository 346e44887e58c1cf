"""Answers of a server around transformers: greedy tokens, and the weights of every head with their entropies."""

import base64
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Model:
    """A model with eager attention, which can return its weights."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    @torch.inference_mode()
    def generated(self, texts: list[list[int]], most: int) -> list[list[int]]:
        """Return so many greedy tokens for each text; texts are filled up at the left."""
        ids, mask = _filled(texts)
        made = self._model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
        return [row[ids.shape[1] :].tolist() for row in made]

    @torch.inference_mode()
    def weights(self, texts: list[list[int]]) -> list[dict[str, Any]]:
        """Return the weights of every layer and head as base64, and their entropies."""
        ids, mask = _filled(texts)
        out = self._model(ids, attention_mask=mask, output_attentions=True, use_cache=False)
        found = torch.stack(out.attentions, 1)  # [B, layers, H, L, L]
        replies = []
        for row, text in zip(found, texts, strict=True):
            own = row[..., -len(text) :, -len(text) :].contiguous()
            entropies = torch.special.entr(own).sum(-1).mean(-1)
            replies.append({"weights": base64.b64encode(own.numpy().tobytes()).decode(), "entropy": entropies.tolist()})
        return replies


def _filled(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    return ids, torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
