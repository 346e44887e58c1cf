"""Attention of the service inside PyTorch: forward and backward passes run on the server (extra ``torch``).

from attention_client import Client
from attention_client.torch import RemoteMultiheadAttention, remote_attention

with Client() as client:
    attention = RemoteMultiheadAttention(64, 4, batch_first=True, client=client)
    output, weights = attention(tokens, tokens, tokens)
    output = remote_attention(query, key, value, spec={"masks": [{"name": "causal"}]}, client=client)
"""

from attention_client.torch.raw_function import remote_attention
from attention_client.torch.remote_multihead import RemoteMultiheadAttention

__all__ = ["RemoteMultiheadAttention", "remote_attention"]
