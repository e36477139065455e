"""Golden transcripts: an episode is played, told as prose, and compared with the text that somebody has read and found right.

`pytest tests/scenarios --rewrite-golden` writes the texts anew; read the diff before you commit it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("golden")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden transcripts anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compares a transcript with the golden file named after the test."""
    path = GOLDEN / f"{request.node.name.removeprefix('test_')}.txt"

    def compare(transcript: str) -> None:
        text = f"{request.function.__doc__}\n\n{transcript}"
        if request.config.getoption("--rewrite-golden", default=False):
            path.write_text(text)
        assert path.exists(), f"{path} is missing; write it with: pytest tests/scenarios --rewrite-golden"
        assert text.splitlines() == path.read_text().splitlines()

    return compare
