"""Images as inputs: decoded, cut into patches by an encoder, and beside text in a prompt.

It imports ``inputs``, ``passes`` and the rooms below. Read ``encoder_inputs.py`` first.
"""
