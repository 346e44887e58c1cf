"""Recordings: hidden states, weights and taps of every layer for one text, as one safetensors file.

    from attention_client.recording import Recording, record

    recording = record(model, tokenizer, "The cat sat.")  # a model and its tokenizer of transformers
    recording.save("cat.safetensors")
    recording = Recording.load("cat.safetensors")  # mapped: tensors are read when they are asked for
    recording.top_keys("layers.0", head=3, query=2)

``record`` needs the extra ``transformers``; all else needs numpy and safetensors only.
"""

from attention_client.recording.recorded import Recording
from attention_client.recording.recorder import record

__all__ = ["Recording", "record"]
