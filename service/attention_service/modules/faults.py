"""What went wrong below, in words that may be shown."""


def reason(fault: Exception) -> str:
    """Why, in one line; the paths of this machine, which an OSError tells, are not the caller's to know."""
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    return next(iter(str(fault).splitlines()), "") or type(fault).__name__
