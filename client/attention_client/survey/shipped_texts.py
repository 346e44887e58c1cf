"""The texts that ship: short stories and lists by the grammar of ``training/tiny_text.py``, under this licence."""

from importlib.resources import files


def shipped_texts() -> list[str]:
    """Return the texts, which the model that ships was not trained on."""
    return texts_of(files("attention_client.survey").joinpath("texts.txt").read_text("utf-8"))


def texts_of(content: str) -> list[str]:
    """Return the texts of a file: one for each line that is not empty."""
    return [line.strip() for line in content.splitlines() if line.strip()]
