"""Safetensors files as transformers writes them: every tensor is one of the model's."""

from typing import Final

from attention_service.modules.checkpoints.forms.form import Facts, Form, FormReader, Stored, whole


def safetensors(stored: Stored) -> Form:
    """The form of any files: their tensors as they are stored."""
    return Form(Facts(stored.config), {name: whole(name) for name in stored.names})


SAFETENSORS: Final = FormReader(safetensors)
