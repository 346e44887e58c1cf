"""The reason of a fault, without paths of the server's disk."""


def reason(fault: Exception) -> str:
    """Return the reason in one line. The text of an OSError is cut, since it names paths of the server."""
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    return next(iter(str(fault).splitlines()), "") or type(fault).__name__
