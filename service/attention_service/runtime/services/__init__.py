"""The services of the engine: modules, recordings, analysis, kept passes, fetched checkpoints, the store of others.

It imports ``sessions`` and the rooms below it. Read ``module_service.py`` first.
"""
