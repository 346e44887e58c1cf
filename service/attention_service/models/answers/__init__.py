"""The replies to questions about an input: predictions, weights, gradients, recordings, embeddings, similarity.

Questions of several files have folders: ``lenses``, ``sweeps`` and ``paths`` (effects), ``context``, and ``pairs``.

It imports ``costs`` and the rooms below it. Read ``model_forward.py`` first.
"""
