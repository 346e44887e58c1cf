"""Requests about modules and raw attention: bound, planned, admitted and run; sessions and services. No protocols.

It imports the modules, the cost and the core. Read ``scheduling/request_runner.py`` first.
"""
