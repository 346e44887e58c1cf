"""Images as inputs of whole models: decoded within limits, and the patches of which they become tokens."""
