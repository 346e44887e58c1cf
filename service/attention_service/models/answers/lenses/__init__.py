"""Lenses: what states inside a model would predict if they were read out at once.

It imports ``answers``, ``costs`` and the rooms below. Read ``lens_reply.py`` first.
"""
