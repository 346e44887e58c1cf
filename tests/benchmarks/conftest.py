"""Fixtures of the benchmarks' tests."""

import shutil

import pytest


@pytest.fixture
def sockets(monkeypatch):
    """The load comes from the project's own generator, which knows fractions of a second."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
