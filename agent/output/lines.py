"""Cuts a stream of bytes into lines, which another program shows one by one."""

from __future__ import annotations

import re

LONGEST = 1 << 16
"""The most bytes that wait for the end of their line."""
_END = re.compile(rb"(\r?\n|\r(?=[^\n]))")
"""A carriage return ends a line, too, because progress bars print no other end. The last byte does not tell yet whether it is one."""


def cut(text: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete lines with their ends, and the rest. A longer rest than LONGEST counts as a line."""
    *parts, rest = _END.split(text)
    lines = [line + end for line, end in zip(parts[::2], parts[1::2], strict=True)]
    return ([*lines, rest + b"\n"], b"") if len(rest) > LONGEST else (lines, rest)
