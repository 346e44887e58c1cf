"""The operations that a client asks for: forward, weights, gradients, complexity and retrieval."""
