"""Binding: a request becomes sizes and tensors that are checked, before anything is allocated."""
