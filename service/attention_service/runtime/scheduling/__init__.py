"""Scheduling: the queue, batches, the memory budget and the device's lane."""
