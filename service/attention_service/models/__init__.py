"""Whole models: each in a process of its own, which transformers computes but for its attention."""
