"""The languages that models of sounds name in their tokens and prompts. Source: Radford et al. 2022, Whisper."""

from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE


def language_code(language: str) -> str:
    """Return the code of a language by its name in English, as ``en`` of ``English``; other words as they are."""
    name = language.lower()
    return TO_LANGUAGE_CODE.get(name, name)


def language_name(code: str) -> str | None:
    """Return the name of a language in English by its code; None for one that Whisper does not know."""
    return LANGUAGES.get(code)
