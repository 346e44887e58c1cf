"""The memory and the time that a request to a whole model takes, by the passes (stages) of each question.

It imports ``loaded`` and the rooms below it. Read ``model_costs.py`` first.
"""
