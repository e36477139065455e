"""Where snapshots lie: below a directory, or below a prefix in an object store. Address → place.

A place has the same calls in both, and keeps the same promises:

    place / name                the place below it
    there(name)                 whether a file or object of that name is there
    read(name, most)            its bytes; SnapshotError when it is not there, or has more than `most`
    write(name, data)           durably, and whole or not at all
    rename(name, new)           in an object store the new one is there before the old one goes: whoever looks between sees both
    delete(name)                durably
    reading(name)               a block during which `retract` does not delete it: by a lock, which dies with its process; an object
                                store has none
    retract(name)               `delete`, unless somebody is reading it; whether it went
    clear()                     all that is below; a kill may leave some of it
    holding(names)              each child, and which of `names` it holds: one look at all of them
    renewed()                   a block that writes anew what is below: what a killed writer left goes first; a failure leaves nothing,
                                for the space may be what is lacking. An object is replaced whole, and left
    sync()                      the names of all that is below are durable

A name may hold "/". All raise MachineError where storage does not answer, which says nothing about what it holds.
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
    """What `at` makes a place from, in any process, of what a person gives. Raises UsageError.

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
    """The place at `address`. Asks nothing of the store. Raises UsageError."""
    if "://" not in address:
        return Files(Path(address).absolute())
    if address.startswith("file://"):
        host, path = urlsplit(address)[1:3]
        if host or not path:
            raise UsageError(f"{address} is no file:///path")
        return Files(Path(unquote(path)))
    return Objects.at(address)
