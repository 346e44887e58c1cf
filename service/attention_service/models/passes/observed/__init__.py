"""The attention of models that compute it themselves, seen and changed in their own functions.

It imports ``passes`` and the rooms below it. Read ``observed_attention.py`` first.
"""
