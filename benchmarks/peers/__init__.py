"""Other servers, each installed in an environment of its own and serving the same attention.

A file here runs in its peer's environment, and imports nothing of the project but ``benchmarks.servers.attention``;
``entries`` and ``environments`` run in the project's.
"""
