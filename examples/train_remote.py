"""Train a small transformer with attention in this process and with attention of the service; compare the losses.

The task: repeat a sequence of random tokens after a separator, which a model without attention cannot do. Both runs
begin with the same parameters, see the same batches and use the same optimizer.

Needs a running service (``attention serve``, or ATTENTION_URL) and torch: ``python examples/train_remote.py``
"""

import argparse
import copy

import torch
from torch import Tensor, nn

from attention_client import Client
from attention_client.torch import RemoteMultiheadAttention

TOKENS, LENGTH, WIDTH, HEADS, BATCH = 8, 5, 32, 4, 32
SEPARATOR = TOKENS


class Repeater(nn.Module):
    """Two causal transformer layers that predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS + 1, WIDTH)
        self.positions = nn.Parameter(torch.randn(2 * LENGTH, WIDTH) / WIDTH**0.5)
        # Without dropout: the service draws the weights to drop from another generator than torch.
        # With GELU: at a bend of ReLU, two runs that round differently part.
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, ``[batch, length, tokens]``."""
        embedded = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(embedded, mask=causal, is_causal=True))


def with_remote_attention(model: Repeater, client: Client) -> Repeater:
    """Return a copy of a model whose attention is computed by the service."""
    model = copy.deepcopy(model)
    for layer in model.layers.layers:
        assert isinstance(layer, nn.TransformerEncoderLayer)
        layer.self_attn = RemoteMultiheadAttention.of(layer.self_attn, client)
    return model


def losses(model: Repeater, steps: int) -> list[float]:
    """Train for some steps; return the loss of each."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        sequence = torch.randint(TOKENS, (BATCH, LENGTH))
        tokens = torch.cat([sequence, torch.full((BATCH, 1), SEPARATOR), sequence], 1)
        logits = model(tokens[:, :-1])[:, LENGTH:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sequence.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = Repeater()
    with Client() as client:
        remote = losses(with_remote_attention(model, client), steps)
    local = losses(model, steps)

    print("step   local loss   remote loss   difference")
    for step in range(0, steps, max(steps // 10, 1)):
        print(f"{step:>4} {local[step]:12.6f} {remote[step]:13.6f} {abs(local[step] - remote[step]):12.1e}")
    largest = max(abs(a - b) for a, b in zip(local, remote, strict=True))
    print(f"largest difference over {steps} steps: {largest:.1e}")
    assert largest < 1e-4, "the two runs are not the same"
    assert steps < 250 or remote[-1] < remote[0] / 2, "nothing was learned"


if __name__ == "__main__":
    main()
