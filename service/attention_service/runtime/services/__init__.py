"""The services of the engine: modules, recordings, analysis, kept passes, fetched checkpoints, changes of the store.

It imports ``sessions`` and the rooms below it. Read ``module_service.py`` first.
"""
