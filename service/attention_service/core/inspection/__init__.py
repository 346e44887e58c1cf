"""Looking into attention: weights, their statistics, effects of edits, attribution, rollout, similarity, circuits.

It imports the other packages of the core. Read ``weights.py`` first.
"""
