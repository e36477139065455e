"""`--seed N` plays one episode and prints it. `--episodes N --first M` plays more of them, so that a long campaign goes on where it was.

Episodes start no process and share no memory; tests that do may run beside them.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seed", type=int, help="play the episode of this seed alone, and print it")
    group.addoption("--episodes", type=int, default=2_000, help="how many episodes the campaign plays")
    group.addoption("--first", type=int, default=0, help="the first seed of the campaign")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--seed") is not None:
        items[:] = [item for item in items if item.name == "test_no_episode_breaks_an_invariant"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> None:
    """Nothing can be."""
