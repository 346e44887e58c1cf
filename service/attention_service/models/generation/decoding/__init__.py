"""Decoding: the passes that read prompts and give texts their next tokens, and the attention that chose each.

It imports ``pasts``, and the rooms below ``generation``. Read ``decoder.py`` first.
"""
