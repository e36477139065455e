"""`--seed N` plays one episode and prints it; `--long` plays many more, from `--first` on, so that a long campaign goes on where it was."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seed", type=int, help="play the episode of this seed alone, and print it")
    group.addoption("--episodes", type=int, help="how many episodes the campaign plays")
    group.addoption("--first", type=int, default=0, help="the first seed of the campaign")
    group.addoption("--long", action="store_true", help="a campaign of 200,000 episodes: hours")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--seed", default=None) is not None:
        items[:] = [item for item in items if item.name == "test_no_episode_breaks_an_invariant"]
