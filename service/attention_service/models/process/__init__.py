"""The process of one model: the loop that takes requests and answers them, and the operations that it knows.

It imports every room but ``server``, and has no event loop. Read ``turns.py`` first.
"""
