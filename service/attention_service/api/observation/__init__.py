"""Metrics, logs and traces: the server as an operator sees it.

It imports ``access`` and what is below it, and the engine. Read ``telemetry.py`` first.
"""
