"""Reads single options from a script's arguments, as Python's argparse reads them: the last one counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def value(words: Sequence[str], option: str) -> str:
    """Return the option's last value, from `--option value` or `--option=value`; empty: there is none."""
    found = ""
    for word, after in pairwise([*words, ""]):
        name, equals, joined = word.partition("=")
        if name == option:
            found = joined if equals else after
    return found


def number(words: Sequence[str], option: str, default: int) -> int:
    """Return the option's last value; the default if there is none, or it is no positive number."""
    found = value(words, option)
    return int(found) if found.isdecimal() and int(found) else default
