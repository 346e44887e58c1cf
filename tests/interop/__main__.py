"""``make test-interop``: install tritonclient and KServe's client into ``.cache/interop``, and ask a server by each."""

import subprocess
import sys

from tests.interop.environment import ENVIRONMENT, PYTHON, ask_by_clients

PACKAGES = ("tritonclient[http]>=2.73", "kserve>=0.21")


def main() -> int:
    """Install the clients if they are not there, and return the status of their calls."""
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        install = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
        subprocess.run(install, check=True)
    done = ask_by_clients()
    print(done.stdout, done.stderr, sep="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
