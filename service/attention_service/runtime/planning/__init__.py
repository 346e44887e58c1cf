"""Planning: the kernel and the cost of what was bound."""
