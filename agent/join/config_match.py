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
"""By section: the keys that must be equal on all ranks, because all ranks judge the same figures by them. An empty tuple means all keys."""


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


_MOST = 8
"""The most differences between two commands that a message names."""
_LONGEST = 80
"""The most characters of a value that a message shows."""


def command_difference(here: Sequence[str], there: Sequence[str]) -> str:
    """Return in words in which arguments two commands differ."""
    mine, theirs = _arguments(here), _arguments(there)
    differ = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not differ:
        return "the same arguments, in another order"
    parts = [f"{name} is {_said(mine.get(name))} here, and {_said(theirs.get(name))} there" for name in differ[:_MOST]]
    return "; ".join([*parts, *([f"and {len(differ) - _MOST} more"] if len(differ) > _MOST else [])])


def _arguments(command: Sequence[str]) -> dict[str, str]:
    """Return the values of a command's options, by name. Words before the first option are the script."""
    found: dict[str, list[str]] = {}
    name = "the script"
    for word in command:
        if word.startswith("-") and not word[1:2].isdigit():
            name, equals, value = word.partition("=")
            found.setdefault(name, []).extend([value] if equals else [])
        else:
            found.setdefault(name, []).append(word)
    return {name: " ".join(values) for name, values in found.items()}


def _said(value: str | None) -> str:
    if value is None:
        return "absent"
    return (value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…") or "given"
