"""The inputs of a model: texts, tokens, messages and images as tensors, with labels for reading."""
