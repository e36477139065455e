"""What a launching terminal prints, where nobody reads."""

import os

from mt_resilient.agent.output.async_output import Printing

LINE = b"x" * 999 + b"\n"


def test_a_stopped_reader_delays_nothing_and_is_told_how_many_lines_are_missing() -> None:
    reading, writing = os.pipe()
    printing = Printing(writing, most=10)
    for _ in range(1000):  # of which a pipe takes 64 KiB
        printing.show(LINE)
    printing.end()
    read = b""
    while not read.endswith(b"read the output\n"):
        read += os.read(reading, 1 << 16)
    printing.thread.join(60)
    assert not printing.thread.is_alive()
    *lines, last = read.splitlines(keepends=True)
    assert set(lines) == {LINE}
    assert (
        last == f"mt-resilient: {1000 - len(lines)} lines are missing here, because nothing read the output\n".encode()
    )
    os.close(reading)
    os.close(writing)


def test_the_thread_ends_although_the_reader_is_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    printing = Printing(writing)
    printing.write("a line\n")
    printing.end()
    printing.thread.join(60)
    assert not printing.thread.is_alive()
    os.close(writing)
