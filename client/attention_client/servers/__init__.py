"""Servers that this package starts: one of a program, which ends with it, and one of a user, which commands share."""
