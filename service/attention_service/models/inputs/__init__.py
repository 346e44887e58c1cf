"""The inputs of a model: texts, tokens, messages and images as tensors, with labels for reading.

It imports ``passes`` and the rooms below it; ``images`` and ``sounds`` make what ``model_inputs.py`` puts together.
Read ``model_inputs.py`` first.
"""
