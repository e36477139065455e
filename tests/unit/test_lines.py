"""A stream is cut into lines, and nothing waits for the end of a line that does not come."""

import pytest

from mt_resilient.agent.output.async_output import LONGEST, cut

LONG = b"x" * LONGEST


@pytest.mark.parametrize(
    ("text", "lines", "rest"),
    [
        (b"", [], b""),
        (b"one\ntwo", [b"one\n"], b"two"),
        (b"\n\n", [b"\n", b"\n"], b""),
        (b"\r 10%\r 20%", [b"\r", b" 10%\r"], b" 20%"),
        (b"one\r\ntwo\r\r\n", [b"one\r\n", b"two\r", b"\r\n"], b""),
        (b"one\r", [], b"one\r"),  # perhaps a line feed follows
        (LONG, [], LONG),
        (b"one\n" + LONG + b"x", [b"one\n", LONG + b"x\n"], b""),
    ],
    ids=["nothing", "a rest", "empty lines", "a progress bar", "both ends", "half of an end", "long", "too long"],
)
def test_a_carriage_return_or_many_bytes_end_a_line_too(text: bytes, lines: list[bytes], rest: bytes) -> None:
    assert cut(text) == (lines, rest)
