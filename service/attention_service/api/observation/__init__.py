"""Metrics, logs and traces: the server as an operator sees it."""
