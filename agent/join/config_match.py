"""What all nodes have to be told alike: configuration and options of `run` → what differs from the defaults, by its name; and the version
of this program. Pure.

At each boundary all ranks judge the same figures, and each by its own node's configuration: where that differs, some go back and others
wait for them, or a snapshot that one node writes another never begins. Which batches are left out decides what is trained. Agents of two
versions may judge, or write to the store, otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...resilience.model.data_windows import Window, merged

SHARED: dict[str, tuple[str, ...]] = {
    "spikes": (),
    "ladder": (),
    "rescue": (),
    "snapshots": ("every_steps", "durable_every_steps", "slots", "reach_steps"),
    "copies": ("every_s",),
}
"""By section: the keys that ranks judge by together; none named: all."""


def alike(policies: Mapping[str, Any], windows: Sequence[Window], origin: str | None, version: str) -> dict[str, str]:
    """windows: of data, that are left out; origin: what --start-from names; version: of this program."""
    told = {"the version of mt-resilient": version}
    for section, names in SHARED.items():
        policy = policies[section]
        usual = type(policy)()
        for name in names or [field.name for field in fields(policy)]:
            if getattr(policy, name) != getattr(usual, name):
                told[f"{section}.{name}"] = str(getattr(policy, name))
    if windows:
        told["--skip-data"] = ", ".join(map(str, merged(windows)))
    if origin:
        told["--start-from"] = origin
    return told


def apart(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """What this node and the job's others were told differently, in words; empty: nothing."""
    differ = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    usual = "as it is by default"
    return "; ".join(f"{key} is {here.get(key, usual)} here, and {there.get(key, usual)} there" for key in differ)
