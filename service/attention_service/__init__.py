"""The attention service: attention modules and whole models that stay resident, and questions about them over HTTP.

``api`` translates HTTP for ``engine.py``. The engine answers questions about modules by ``runtime``, and those about
whole models by ``models``. Below them are ``modules``, their ``cost``, and the mathematics in ``core``.

It imports every package below it. Read ``engine.py`` first.
"""

from importlib.metadata import version

__version__ = version("attention-service")
