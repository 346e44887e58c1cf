"""Sweeps of edits: each edit by itself, measured in passes of many copies of the texts.

It imports ``answers``, ``costs`` and the rooms below. Read ``swept_effects.py`` first.
"""
