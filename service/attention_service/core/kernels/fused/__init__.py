"""The fused kernel: PyTorch's scaled dot product attention, in slices and blocks on a CPU."""
