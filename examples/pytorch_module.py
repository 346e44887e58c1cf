"""Save the state dict of a torch.nn.MultiheadAttention, import it into the service, and compare the outputs.

Run it on the machine of the service, because the service imports checkpoints from its model repository. Use the same
ATTENTION_MODELS_DIR, if you set one.

Needs a running service (``attention serve``, or ATTENTION_URL) and torch: ``python examples/pytorch_module.py``
"""

import torch
from safetensors.torch import save_file

from attention_client import Client
from attention_service.settings import Settings

torch.manual_seed(0)
module = torch.nn.MultiheadAttention(embed_dim=64, num_heads=4, batch_first=True).eval()
torch.nn.init.normal_(module.in_proj_bias)  # torch initializes biases to zero, which hides errors

folder = Settings().models_dir / "pytorch-module"
folder.mkdir(parents=True, exist_ok=True)
save_file(module.state_dict(), folder / "model.safetensors")

tokens, memory = torch.randn(2, 5, 64), torch.randn(2, 7, 64)
padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])  # torch's True hides a key
with torch.inference_mode():
    output, weights = module(tokens, memory, memory, key_padding_mask=padding, average_attn_weights=False)

with Client() as client:
    # A state dict tells neither the number of heads, nor the masks, nor add_zero_attn.
    spec = {"masks": [], "add_zero_attn": False}
    imported = client.modules.import_("pytorch-module", num_heads=4, spec=spec, name="pytorch-module")
    reply = client.forward(imported.name, tokens, memory, key_mask=~padding, return_=["output", "weights"])

for name, ours, theirs in (("output", output, reply.output), ("weights", weights, reply.weights)):
    difference = (ours - torch.as_tensor(theirs)).abs().max().item()
    print(f"{name:<7} {list(ours.shape)!s:<15} largest difference {difference:.1e}")
    assert difference < 1e-6, name
