"""The memory and the time that a request to a whole model takes."""
