"""Resident modules: their parameters on the device, their durable store, and the import of checkpoints."""
