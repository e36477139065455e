"""A sentence of ours on a rank's stderr. Whether anything takes it is nothing to the training: a disk may be full, a reader gone."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(sentence: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed by the script, or None
        print(f"mt-resilient: {sentence}", file=sys.stderr, flush=True)
