"""``make test-interop``: ask a server by tritonclient and KServe's client, and by the suites that others keep.

Clients and suites are installed into ``.cache/interop``.
"""

import subprocess
import sys

from tools.interop.environment import ENVIRONMENT, PYTHON, ask_by_clients
from tools.interop.outside_suites import ask_by_suites

PACKAGES = ("tritonclient[http]>=2.73", "kserve>=0.21", "openresponses-types>=2.4")


def main() -> int:
    """Install the clients if they are not there, and return the status of their calls."""
    written = ENVIRONMENT / "packages.txt"
    if not written.exists() or written.read_text() != "\n".join(PACKAGES):
        if not PYTHON.exists():
            subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        install = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
        subprocess.run(install, check=True)
        written.write_text("\n".join(PACKAGES))
    done = ask_by_clients()
    print(done.stdout, done.stderr, sep="")
    return done.returncode or int(not ask_by_suites())


if __name__ == "__main__":
    sys.exit(main())
