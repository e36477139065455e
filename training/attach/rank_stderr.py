"""Prints this program's sentences on a rank's stderr. If printing fails (a full disk, a closed pipe), the training continues."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(sentence: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed by the script, or None
        print(f"mt-resilient: {sentence}", file=sys.stderr, flush=True)
