"""Benchmarks: what is measured side by side in one run, and how.

Each module with a ``main`` is one page of ``benchmarks/results``; ``python -m benchmarks`` (``make bench``) runs the
quick set. ``benchmarks/README.md`` says what is compared and how to read it. ``workloads`` is what is served, ``load``
sends it, ``rounds`` lets servers take turns, ``measure`` does so for calls in this process, ``tables`` and ``page``
write.
"""
