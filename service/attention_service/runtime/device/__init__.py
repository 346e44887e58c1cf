"""The device that an engine drives, its CUDA graphs and its plans.

It imports the modules, the cost and the core; of the runtime, nothing. Read ``torch_device.py`` first.
"""
