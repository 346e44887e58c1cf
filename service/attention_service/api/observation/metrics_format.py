"""The format of the metrics that a scraper takes, as Prometheus negotiates it.

Source: Prometheus, *Content negotiation* (instrumenting/content_negotiation).
"""

from collections.abc import Callable, Iterator
from typing import Final

import mimeparse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_VERSIONS: Final = {"application/openmetrics-text": ("1.0.0",), "text/plain": ("1.0.0", "0.0.4")}
"""The formats that the library writes, the newest version first."""
_ESCAPINGS: Final = frozenset({"allow-utf-8", "underscores", "dots", "values"})
Encoder = Callable[[CollectorRegistry], bytes]


def metrics_format(accept: str) -> tuple[Encoder, str]:
    """Return what writes the metrics, and its content type, for the header ``Accept``.

    The library's own choice ignores ``q``. Without a format that both know it is text of version 0.0.4.
    """
    ranges = sorted(_ranges(accept), key=lambda media_range: -media_range[0])  # stable: of equal q the first
    encoder, kind = choose_encoder(ranges[0][1] if ranges else "")
    return encoder, kind


def _ranges(accept: str) -> Iterator[tuple[float, str]]:
    """The known formats of the header with their q, as a range that the library reads."""
    for media_range in accept.split(","):
        try:
            kind, subtype, parameters = mimeparse.parse_media_range(media_range)
        except mimeparse.MimeTypeParseException:
            continue
        name = f"{kind}/{subtype}"
        known = _VERSIONS.get(name, ())
        version = parameters.get("version") or (known[-1] if known else "")
        if version not in known or not (share := float(parameters["q"])):
            continue
        escaping = parameters.get("escaping")
        suffix = f"; escaping={escaping}" if escaping in _ESCAPINGS else ""
        yield share, f"{name}; version={version}{suffix}"
