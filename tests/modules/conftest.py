from pathlib import Path

import pytest
import torch

from attention_contract.schemas.modules import CreateModule
from attention_service.modules.library import Library


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def library(root: Path) -> Library:
    return reopened(root)


@pytest.fixture
def reopen(root: Path):
    """Open the library as a new process would."""
    return lambda: reopened(root)


def reopened(root: Path) -> Library:
    library = Library(root, torch.device("cpu"))
    library.load()
    return library


@pytest.fixture
def request_for():
    return lambda name="m", seed=None, parameters=None, **config: CreateModule(
        name=name, config={"d_model": 8, "num_heads": 2} | config, seed=seed, parameters=parameters
    )
