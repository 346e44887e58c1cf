"""The attention service: resident attention modules, and four questions about them over HTTP."""

from importlib.metadata import version

__version__ = version("attention-service")
