"""Exits with 0 if this Python finds mt_resilient. In a container, the path of the agent's Python may be that of another Python."""

import sys
from importlib.util import find_spec

if __name__ == "__main__":
    sys.exit(find_spec("mt_resilient") is None)
