"""The mathematics of attention: torch in, torch out. Knows nothing of HTTP, resident modules or devices' state.

It imports the contract alone. Read ``attention.py`` first.
"""
