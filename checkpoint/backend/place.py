"""Where snapshots lie: below a directory, or below a prefix in an object store. Address → place.

A place has the same methods for both, and keeps the same promises:

    place / name                the place below it
    there(name)                 whether a file or object of that name is there
    read(name, most)            its bytes; SnapshotError when it is not there, or has more than `most`
    write(name, data)           durably, and whole or not at all
    rename(name, new)           in an object store the new one is there before the old one goes: in between a reader sees both
    delete(name)                durably
    reading(name)               a block during which `retract` does not delete it: by a lock, which ends with its process; an object
                                store has none
    retract(name)               `delete`, unless a process is reading it; returns whether it was deleted
    clear()                     deletes all that is below; a kill may leave some of it
    holding(names)              each child, and which of `names` it holds: one look at all of them
    renewed()                   a block that writes anew what is below: first it deletes what a killed writer left. A failure leaves
                                nothing, because the disk may be full. An object store deletes nothing: objects are replaced whole
    sync()                      makes the names of all that is below durable

A name may hold "/". All raise MachineError if storage does not answer. That says nothing about what it holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlencode, urlsplit

from ...resilience.errors import UsageError
from .filesystem import Files
from .object_store import Objects

Place: TypeAlias = Files | Objects


def address(given: str, endpoint: str = "", region: str = "") -> str:
    """Return the address of the place that a person names. From it `at` makes the place in any process. Raises UsageError.

    given: a path, file:///path, s3://bucket/prefix or gs://bucket/prefix; endpoint: http://host:port of an S3 server that is not AWS.
    """
    scheme = urlsplit(given).scheme if "://" in given else "file"
    if scheme not in ("file", "s3", "gs"):
        raise UsageError(f"snapshots cannot go to {given}: name a directory, s3://bucket/prefix or gs://bucket/prefix")
    if scheme != "s3" and (endpoint or region):
        raise UsageError(f"snapshots.endpoint and snapshots.region are for s3:// URLs; {given} is none")
    if "?" in given and scheme != "file":
        raise UsageError(f"{given}: the endpoint and the region of a store are given by --set snapshots.endpoint=…")
    beside = urlencode({name: value for name, value in (("endpoint", endpoint), ("region", region)) if value})
    found = f"{given}?{beside}" if beside else given
    at(found)
    return found


def at(address: str) -> Place:
    """Return the place at `address`. Asks nothing of the store. Raises UsageError."""
    if "://" not in address:
        return Files(Path(address).absolute())
    if address.startswith("file://"):
        host, path = urlsplit(address)[1:3]
        if host or not path:
            raise UsageError(f"{address} is no file:///path")
        return Files(Path(unquote(path)))
    return Objects.at(address)
