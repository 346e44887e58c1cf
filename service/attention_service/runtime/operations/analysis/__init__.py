"""Analyses of weights, features and parameters: computations that read what they need part by part.

It imports ``scheduling`` and the rooms below it. Read ``base.py`` first.
"""
