"""Resident modules: their parameters on the device, their durable store, and the import of checkpoints.

It imports the core, and knows nothing of requests. Read ``resident.py`` first.
"""
