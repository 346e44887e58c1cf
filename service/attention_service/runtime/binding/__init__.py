"""Binding: a request becomes sizes and tensors that are checked, before anything is allocated.

It imports ``device``, the modules and the cost. Read ``module_binding.py`` first.
"""
