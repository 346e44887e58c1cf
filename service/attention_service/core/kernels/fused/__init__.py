"""The fused kernel: PyTorch's scaled dot product attention, in slices and blocks on a CPU.

It imports ``kernels`` and what is below it. Read ``kernel.py`` first.
"""
