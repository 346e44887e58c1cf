"""The residual stream of a loaded model: what its layers add to it, how it is read out, and the search for it.

It imports ``loaded`` and the rooms below it. Read ``residual_stream.py`` first.
"""
