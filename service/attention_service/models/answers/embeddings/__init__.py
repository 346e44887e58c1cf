"""Vectors of texts and images, and what is made of two: the scores of pairs, and similarities with their gradients.

It imports ``answers``, ``costs`` and the rooms below. Read ``text_embeddings.py`` first.
"""
