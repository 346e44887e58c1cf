"""Find the heads that copy: knock out each head of a small Llama, with its attention on the service.

The model learns here, in seconds, to continue a sequence that repeats. That takes a head that looks back by one token,
and one that looks at the token after the earlier occurrence of the present one (an induction head: Olsson et al. 2022).

Needs a running service (``attention serve``, or ATTENTION_URL) and the extra ``transformers``:
``python examples/knock_out_a_head.py``
"""

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from attention_client import Client
from attention_client.transformers import attach

TOKENS, LENGTH, LAYERS, HEADS = 16, 8, 2, 4


def repeated(sequences: int) -> torch.Tensor:
    """Return sequences ``[sequences, 2 · LENGTH]`` of different tokens, each twice in the same order."""
    first = torch.stack([torch.randperm(TOKENS)[:LENGTH] for _ in range(sequences)])
    return torch.cat([first, first], dim=1)


def learn(model: LlamaForCausalLM) -> float:
    """Train until the model continues the repetition; return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = torch.tensor(torch.inf)
    for _ in range(1000):
        tokens = repeated(64)
        logits = model(tokens).logits[:, LENGTH - 1 : -1]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break
    return loss.item()


@torch.no_grad()
def logits_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits for the second half, from the second of its tokens on."""
    return model(tokens).logits[:, LENGTH:-1]


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print(f"trained to a loss of {learn(model):.3f}")
    model.eval()
    tokens = repeated(32)
    following = tokens[:, LENGTH + 1 :]
    local = logits_of(model, tokens)

    with Client() as client:
        with attach(model, client, record=["weights"]) as attached:
            remote = logits_of(model, tokens)
        print(f"logits on the service and here differ by {(remote - local).abs().max():.1e}")
        print(f"right without an edit: {(remote.argmax(-1) == following).float().mean():.0%}")

        queries = np.arange(LENGTH, 2 * LENGTH)
        print("\nlayer head   looks back by one   looks past the earlier one   knocked out: logits change   right")
        for layer in range(LAYERS):
            weights = attached.recorded[layer]["weights"]  # [sequences, heads, queries, keys]
            previous = weights[:, :, queries, queries - 1].mean((0, 2))
            induction = weights[:, :, queries, queries - LENGTH + 1].mean((0, 2))
            for head in range(HEADS):
                with attach(model, client, edits={layer: [{"tap": "weights", "heads": [head], "set": 0}]}):
                    changed = logits_of(model, tokens)
                right = (changed.argmax(-1) == following).float().mean()
                change = (changed - remote).abs().mean()
                looks = f"{previous[head]:>19.2f} {induction[head]:>28.2f}"
                print(f"{layer:>5} {head:>4} {looks} {change:>28.2f} {right:>7.0%}")


if __name__ == "__main__":
    main()
