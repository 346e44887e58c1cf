"""Attention of new tokens over the keys and values of earlier ones.

It imports ``kernels`` and what is below it. Read ``past.py`` first.
"""
