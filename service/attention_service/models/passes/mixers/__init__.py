"""Layers that mix tokens by a running state, as weights over all pairs of tokens.

It imports ``observed``, ``passes`` and the rooms below. Read ``implicit_layers.py`` first.
"""
