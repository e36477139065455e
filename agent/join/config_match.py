"""Collects the settings that must be the same on all nodes: this program's version, and certain options and configuration values of `run`
that differ from the default.

At each boundary (between two steps), all ranks judge the same figures, such as the loss. Each rank uses its own node's configuration. If
configurations differ, some ranks rewind while others wait for them, or one node begins a snapshot that another never begins. The skipped
batches must be the same, because they change the training. Agents of two versions may judge differently, or write to etcd differently.
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
"""By section: the keys that must be equal on all ranks, because all ranks judge together by them. An empty tuple means all keys."""


def alike(policies: Mapping[str, Any], windows: Sequence[Window], origin: str | None, version: str) -> dict[str, str]:
    """Return the settings that must be the same on all nodes, by name. windows: the data windows that are skipped. origin: the value of
    --start-from. version: this program's version."""
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
    """Return in words which settings differ between this node and the job's other nodes; empty: none."""
    differ = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    usual = "the default"
    return "; ".join(f"{key} is {here.get(key, usual)} here, and {there.get(key, usual)} there" for key in differ)
