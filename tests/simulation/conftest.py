"""Episodes start no process and share no memory; tests that do may run beside them."""

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> None:
    """Nothing can be."""
