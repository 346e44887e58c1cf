"""The files that import vLLM, and that vLLM imports by the names of their classes.

They import the rest of the package. Read ``observing_workers.py`` first.
"""
