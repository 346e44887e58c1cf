"""The device that an engine drives, its CUDA graphs and its plans."""
