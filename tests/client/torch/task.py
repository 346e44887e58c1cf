"""A data set whose items are computed by the service, in whatever process reads them."""

import torch
from torch.utils.data import Dataset

from attention_client.torch import RemoteMultiheadAttention


class Attended(Dataset):
    """Item i is the output of a module for i ones."""

    def __init__(self, module: RemoteMultiheadAttention) -> None:
        self.module = module

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = torch.full((3, self.module.embed_dim), float(index))
        with torch.no_grad():
            return self.module(tokens, tokens, tokens)[0]
