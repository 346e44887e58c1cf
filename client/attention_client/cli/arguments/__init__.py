"""The arguments of a command: options from a request's fields, tensors from files, and completion."""
