"""Pairs of texts, or of a text and an image: scores, and the similarity of vectors with its gradient.

It imports ``answers``, ``costs`` and the rooms below. Read ``pair_scores.py`` first.
"""
