"""Prints this program's sentences on a rank's stderr. If that fails (a full disk, a reader that is gone), the training goes on."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(sentence: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed by the script, or None
        print(f"mt-resilient: {sentence}", file=sys.stderr, flush=True)
