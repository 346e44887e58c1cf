"""The attention service: resident attention modules, and four questions about them over HTTP."""
