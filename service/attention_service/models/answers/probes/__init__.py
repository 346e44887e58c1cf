"""Features of tokens to which linear probes are fitted, and states to which steering vectors are.

It imports ``answers`` and the rooms below. Read ``token_features.py`` first.
"""
