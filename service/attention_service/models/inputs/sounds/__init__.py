"""Sounds as inputs: decoded, as frames that an encoder makes of them, and beside text in a prompt.

It imports ``inputs``, ``passes`` and the rooms below. Read ``sound_inputs.py`` first.
"""
