"""Forms in which weights are quantized: the tensors of each, and the float numbers that they stand for."""
