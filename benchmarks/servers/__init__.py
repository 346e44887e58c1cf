"""Bare servers, without validation, admission, metrics or errors: the least that a server can be compared with.

These files run in processes of their own, those of the peers too in environments that have no more than numpy, torch
and the peer. Hence they import nothing else of the project.
"""
