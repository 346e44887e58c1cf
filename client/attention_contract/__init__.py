"""The wire contract of the attention service: spec, operations, schemas, tensors and errors. No I/O, no torch."""
