"""The replies to questions about an input: predictions, weights, gradients, recordings.

Questions of several files have folders: ``lenses``, ``probes``, ``sweeps`` and ``paths`` (effects), ``context``, and
``embeddings`` with the similarities and scores of pairs.

It imports ``costs`` and the rooms below it. Read ``model_forward.py`` first.
"""
