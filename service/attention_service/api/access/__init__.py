"""Access to the server: who may ask, from which pages, for which operations.

It imports the runtime's callers, ``bodies`` and ``http_limits``. Read ``layer.py`` first.
"""
