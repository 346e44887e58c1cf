"""Whole models, each resident in a process of its own: the process, what is said to it, and the service."""
