"""Clusters on this machine, taken apart whatever the test has done to them."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .hosts import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces want root and iproute2")

    def make(nodes: str, *options: str, **fields: Any) -> Cluster:
        made.append(Cluster(tmp_path, nodes, *options, **fields))
        return made[-1]

    yield make
    for each in made:
        each.close()
