"""Attention of new tokens over the keys and values of earlier ones."""
