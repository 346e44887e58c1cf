#!/bin/sh
# prometheus_client answers OpenMetrics to a scraper that refuses it (q=0), and names any version that it was asked
#   for.
#
# Versions: prometheus_client 0.26.0; Python 3.11 on x86-64.
# Guess, written first: choose_encoder takes the format with the largest q, never one with q=0, and the newest
#   version that it can write (RFC 9110, section 12.5.1).
# Behaviour: It takes the first format of the list that it knows, whatever its q. For OpenMetrics of version 9.9.9
#   the content type says version=9.9.9, and the text below it is that of 1.0.0.
# Output:
#   application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores # EOF
#   application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores # EOF
#   application/openmetrics-text; version=9.9.9; charset=utf-8; escaping=underscores # EOF
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet prometheus_client==0.26.0 || exit 2
cd "$folder" && cat > found.py <<'CODE'
def show(*told):
    """Print what was found on one line."""
    print(*told)

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder

registry = CollectorRegistry()
Counter("seen", "Things seen", registry=registry).inc()
for accept in (
    "application/openmetrics-text;version=1.0.0;q=0, text/plain;version=0.0.4",
    "application/openmetrics-text;version=1.0.0;q=0.1, text/plain;version=0.0.4;q=0.9",
    "application/openmetrics-text;version=9.9.9",
):
    encode, kind = choose_encoder(accept)
    show(kind, encode(registry).decode().splitlines()[-1])
CODE
cat > expected.txt <<'OUTPUT'
application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores # EOF
application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores # EOF
application/openmetrics-text; version=9.9.9; charset=utf-8; escaping=underscores # EOF
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
