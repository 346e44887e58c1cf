"""Groups of calls: ``client.modules``, ``client.attention``, ``client.hopfield`` and ``client.server``."""
