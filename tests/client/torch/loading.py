"""A program whose data loader computes its items by the service, in worker processes: ``loading URL fork|spawn``."""

import multiprocessing
import sys

import torch
from torch.utils.data import DataLoader, Dataset

from attention_client import Client
from attention_client.torch import RemoteMultiheadAttention


class Attended(Dataset):
    """Item i is the output of a module for i ones."""

    def __init__(self, module: RemoteMultiheadAttention) -> None:
        self.module = module

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = torch.full((3, self.module.embed_dim), float(index))
        with torch.no_grad():
            return self.module(tokens, tokens, tokens)[0]


def main(url: str, start: str) -> None:
    """Print for each item that a worker made if it equals this process's."""
    with Client(url) as client:
        items = Attended(RemoteMultiheadAttention(8, 2, batch_first=True, client=client))
        expected = [items[index] for index in range(len(items))]
        context = multiprocessing.get_context(start)
        loader = DataLoader(items, None, num_workers=2, multiprocessing_context=context)
        for found, item in zip(loader, expected, strict=True):
            print("equal" if torch.equal(found, item) else "other")


if __name__ == "__main__":
    main(*sys.argv[1:])
