"""The residual stream of a loaded model: what its layers add to it, and how it is read out.

It imports ``loaded`` and the rooms below it. Read ``residual_stream.py`` first; ``stream_search.py`` finds it.
"""
