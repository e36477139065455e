"""Parses a hostfile into hosts, without I/O.

    # DeepSpeed's, Open MPI's and FlagScale's lines, and bare addresses
    gpu-01 slots=8
    gpu-02 slots=8 rack=r1
    train@10.0.0.7 port=2222 name=gpu-03

`slots` must be the same on every line that gives it. The number of ranks on each node comes from the command's --nproc-per-node. Any other
key is a label. The label `rack` says which nodes may be lost together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...resilience.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._%:-]*")
"""A host name, an IPv4 or IPv6 address, or an ssh alias. The pattern allows no character that a shell, an option or an etcd key could
misread."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_MPI_WORDS = {"max_slots", "max-slots", "max"}
"""Open MPI's upper limits on slots, which are ignored, because one agent per node exceeds none of them."""


@dataclass(frozen=True, kw_only=True)
class Host:
    node: str
    """Name of the node: the value of `name=`, or else the host."""
    host: str
    user: str = ""
    port: int = 0
    """0: ssh's default."""
    slots: int = 0
    """Number of ranks; 0: not given."""
    labels: Mapping[str, str] = field(default_factory=dict)


def parse(text: str, file: str) -> tuple[Host, ...]:
    """Return the hosts, in the file's order. file: the file's name, for error messages. Raises UsageError with the line's number."""
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"{file}, line {number}")
        if host.node in lines:
            raise UsageError(
                f"{file}, line {number}: {host.node} is on line {lines[host.node]} already; write one line for each host, "
                "with slots=N for its number of ranks"
            )
        lines[host.node] = number
        hosts.append(host)
    if not hosts:
        raise UsageError(f"{file} names no host; write one on each line")
    return tuple(hosts)


def alike(hosts: Sequence[Host]) -> None:
    """Raise UsageError if hosts have different numbers of slots."""
    said = {host.slots: host.node for host in hosts if host.slots}
    if len(said) > 1:
        few, many = min(said), max(said)
        raise UsageError(
            f"the hostfile gives {said[few]} slots={few} and {said[many]} slots={many}; each node must have the same number of ranks. "
            "Remove the other hosts, or give all hosts the smaller number"
        )


def _host(words: list[str], where: str) -> Host:
    user, at, name = words[0].rpartition("@")
    name = name.removeprefix("[").removesuffix("]")
    if name.count(":") == 1:
        raise UsageError(
            f"{where}: {words[0]} may mean a port, or a number of ranks as in MPICH; write {name.partition(':')[0]} with port=N or slots=N"
        )
    if not _NAME.fullmatch(name) or (at and not _USER.fullmatch(user)):
        raise UsageError(f"{where}: {words[0]} is no host; write host, or user@host, then slots=N")
    settings: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"{where}: {word} is no setting; write key=value without spaces, as slots=8 or rack=r1")
        if key in settings:
            raise UsageError(f"{where}: {key} is given twice")
        settings[key] = value
    node = settings.pop("name", name.replace(":", "-"))
    if not _NODE.fullmatch(node):
        raise UsageError(f"{where}: name={node} is no name of a node; it may have letters, digits, points and dashes")
    port, ranks = _number(settings, "port", where, 65535), _number(settings, "slots", where, 4096)
    labels = {key: value for key, value in settings.items() if key not in _MPI_WORDS}
    for key, value in labels.items():
        if "," in value:
            raise UsageError(f"{where}: {key}={value} has a comma; write one name, as rack=r1")
    return Host(node=node, host=name, user=user, port=port, slots=ranks, labels=labels)


def _number(settings: dict[str, str], key: str, where: str, most: int) -> int:
    text = settings.pop(key, "")
    if text and not (text.isdecimal() and 1 <= int(text) <= most):
        raise UsageError(f"{where}: {key}={text} is no number from 1 to {most}")
    return int(text or 0)
