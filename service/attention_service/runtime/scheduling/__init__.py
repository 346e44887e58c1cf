"""Scheduling: the queue, batches, the memory budget and the device's lane.

It imports ``planning`` and the rooms below it. Read ``executor.py`` first.
"""
