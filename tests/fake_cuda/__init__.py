"""The CUDA path held by tests without a GPU: fake tensors on cuda:0, and what would happen there counted."""
