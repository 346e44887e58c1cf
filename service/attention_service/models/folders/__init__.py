"""Folders as models: the list, and what is told of a model by its files before it is loaded.

It imports ``modules/checkpoints``, and no other room of the models. Read ``model_catalogue.py`` first.
"""
