"""Pasts that running texts share: their keys and values as rows of one slab.

It imports no other room of the models. Read ``joined_past.py`` first.
"""
