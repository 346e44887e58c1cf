"""The replies to questions about an input: predictions, weights, gradients, recordings, embeddings."""
