"""Formats durations, sizes, numbers and lists for people."""

from __future__ import annotations

from collections.abc import Sequence

from ..model.data_windows import Window
from ..model.types import Rank

_READ = 16


def seconds(value: float) -> str:
    """Return a duration in milliseconds or seconds, as text."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def count(number: int, thing: str, several: str = "") -> str:
    return f"{number} {thing if number == 1 else several or f'{thing}s'}"


def steps(number: int) -> str:
    return count(number, "step")


def size(number_bytes: int) -> str:
    """Return a size in kB, MB or GB, as text."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if number_bytes >= scale:
            return f"{number_bytes / scale:.1f} {unit}"
    return f"{number_bytes / 1e3:.0f} kB"


def printable(text: str) -> str:
    """Return the text on one line, in characters that a terminal shows. Other characters, such as a line's end or a byte that is no UTF-8,
    become Python's escapes."""
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def cut(said: str, most: int) -> bytes:
    """Return the text in UTF-8, in at most `most` bytes. A longer text is cut at the end of a word and ends in three dots."""
    data = said.encode(errors="backslashreplace")
    if len(data) <= most:
        return data
    kept = data[: most - len("…".encode())].decode(errors="ignore")
    words = kept.rpartition(" ")[0]
    return f"{words if len(words) > len(kept) // 2 else kept}…".encode()


def _escaped(letter: str) -> str:
    number = ord(letter)
    return f"\\x{number - 0xDC00:02x}" if 0xDC80 <= number <= 0xDCFF else letter.encode("unicode_escape").decode()


def few(things: Sequence[object]) -> list[str]:
    """Return at most 17 texts: all things, or the first 16 and how many more there are. A fault may concern thousands of nodes."""
    more = len(things) - _READ
    return [str(thing) for thing in things] if more <= 1 else [*map(str, things[:_READ]), f"{more:,} more"]


def listed(things: Sequence[object]) -> str:
    *most, last = few(things)
    return f"{', '.join(most)} and {last}" if most else last


def sentence(clause: str) -> str:
    """Return the clause as a sentence: it begins with a capital letter, and ends with a full stop."""
    return f"{clause[0].upper()}{clause[1:]}."


def batches(window: Window) -> str:
    last = window.stop - 1
    return f"batch {window.start}" if window.start == last else f"batches {window.start} to {last}"


def ranks(numbers: Sequence[Rank]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(few(numbers))}"


def duration(seconds: float) -> str:
    """Return a duration in the unit that a person would choose, as text."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
