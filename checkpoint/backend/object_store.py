"""Keys and bytes under a prefix in an object store, through tensorstore's kvstore; and what tensorstore's errors mean.

tensorstore finds the credentials. For s3:// it uses AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or, without these, AWS' usual chain; for
gs://, Google's.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

import tensorstore as ts

from ...resilience.clock import sleep
from ...resilience.errors import MachineError, ResilientError, SnapshotError, UsageError
from .filesystem import MOST_BYTES, larger

DEADLINE_S = 10.0
"""The most seconds for one request. Only this limit detects a server that hangs: the library's retries end only if the server refuses
(measured)."""
LEAST_BYTES_PER_S = 4e6
"""The least rate of a transfer. A slower transfer is abandoned."""
_LIST_BYTES = int(300 * LEAST_BYTES_PER_S)
"""A listing may take as long as a transfer of this many bytes. The store sends 1,000 names at a time, and there may be 100,000."""
_SETTLED_S = 1.0
"""Seconds after which another process that found an object missing has written it."""
_PROBE = ".job"
"""The mark of the job that owns a place (`paths.JOB`)."""
_RETRIES = {"max_retries": 6, "initial_delay": "100ms", "max_delay": "1s"}
"""With these settings, tensorstore gives up on a server that refuses connections after 4 s (measured). With its defaults it would take a
quarter of an hour."""
_DAMAGE = {"NOT_FOUND", "DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT"}
"""The statuses with which tensorstore reports that data is missing, torn or altered. Any other status of tensorstore says nothing about the
stored data."""


@cache
def context() -> ts.Context:
    """Return this process's only tensorstore context. A memory:// store is shared by everything that uses the same context."""
    environment = {"aws_credentials": {"type": "environment"}} if "AWS_ACCESS_KEY_ID" in os.environ else {}
    return ts.Context(
        {
            "s3_request_retries": _RETRIES,
            "gcs_request_retries": _RETRIES,
            "data_copy_concurrency": {"limit": 2},  # the other cores train
            "cache_pool": {"total_bytes_limit": 0},
            **environment,
        }
    )


@dataclass(frozen=True, eq=False)
class Objects:
    """A prefix in an object store that stores snapshots (it implements `place.Place`)."""

    kv: ts.KvStore
    url: str
    beside: str
    """Settings that tensorstore's URLs cannot contain, as a query string: endpoint and region of an S3 server."""

    @classmethod
    def at(cls, address: str) -> Objects:
        """Return the place at `address`: a URL, with the settings after a question mark. Raises UsageError for anything else."""
        url, _, beside = address.partition("?")
        names = {"endpoint": "endpoint", "region": "aws_region"}
        try:
            spec = ts.KvStore.Spec(f"{url.rstrip('/')}/").to_json()
            spec |= {names[name]: value for name, value in parse_qsl(beside)}
            kv = ts.KvStore.open(spec, context=context()).result(timeout=DEADLINE_S)
        except ValueError as error:
            raise UsageError(f"{url} is no place for snapshots: {_words(error)}") from error
        return cls(kv, url.rstrip("/"), beside)

    def __truediv__(self, name: str) -> Objects:
        return Objects(self.kv / f"{name}/", f"{self.url}/{name}", self.beside)

    def __str__(self) -> str:
        return self.url

    @property
    def address(self) -> str:
        return f"{self.url}?{self.beside}" if self.beside else self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def there(self, name: str) -> bool:
        return self._read(name, byte_range=slice(0, 0)) is not None

    def read(self, name: str, most: int = MOST_BYTES) -> bytes:
        if self._reaches(name, most):
            raise larger(f"{self.url}/{name}", most)
        found = self._read(name)
        if found is None:
            raise SnapshotError(f"{self.url}/{name}: {os.strerror(errno.ENOENT)}")
        return found

    def _reaches(self, name: str, at: int) -> bool:
        """Return whether the object has a byte at offset `at`. The store does not report an object's size, and a range beyond its end is an
        error."""
        try:
            return self._read(name, byte_range=slice(at, at + 1)) is not None
        except SnapshotError:
            return False

    def write(self, name: str, data: bytes, *, first: bool = False) -> None:
        self._done(self.kv.write(name, data), name, len(data), writing=True)
        if first:
            # Not every store takes conditional writes: the last of several writers wins, and all of them see it then.
            sleep(_SETTLED_S)

    def rename(self, name: str, new: str) -> None:
        self.write(new, self.read(name))
        self.delete(name)

    def delete(self, name: str) -> None:
        self._done(self.kv.write(name, None), name, writing=True)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        yield

    def retract(self, name: str) -> bool:
        self.delete(name)
        return True

    def clear(self) -> None:
        self._done(self.kv.delete_range(ts.KvStore.KeyRange()), writing=True)

    def holding(self, names: Collection[str], series: Collection[str] = ()) -> dict[str, set[str] | str]:
        found: dict[str, set[str]] = {}
        wanted = {*names, *series}
        self.there(_PROBE)  # so a store that does not answer is found before the time that a long listing may take
        for key in self._done(self.kv.list(), nbytes=_LIST_BYTES):
            child, _, rest = key.decode().partition("/")
            found.setdefault(child, set()).update({rest} & wanted)
        return {**found}

    def lacking(self, names: Collection[str]) -> list[str]:
        return [name for name in names if not self.there(name)]

    @contextmanager
    def renewed(self) -> Iterator[None]:
        yield  # nothing is deleted: the store may still execute an abandoned request, even after the next one

    def sync(self) -> None:
        """Do nothing: an object's name is as durable as its bytes."""

    def _read(self, name: str, **part: Any) -> bytes | None:
        found = self._done(self.kv.read(name, **part), name)
        if found.state == "missing":  # also if the bucket does not exist: then the listing raises
            self._done(self.kv.list(ts.KvStore.KeyRange(name, f"{name}\0")), name)
            return None
        return bytes(found.value)

    def _done(self, future: ts.Future, name: str = "", nbytes: int = 0, *, writing: bool = False) -> Any:
        return done(future, f"{self.url}/{name}" if name else self.url, nbytes, writing=writing)


def done(
    future: ts.Future | ts.WriteFutures, where: str, nbytes: int = 0, *, writing: bool, bounded: bool = True
) -> Any:
    """Return the result of `future`. nbytes: how many bytes it transfers. Raises SnapshotError if it reads damaged or missing data, and
    MachineError for any other failure."""
    try:
        return future.result(timeout=DEADLINE_S + nbytes / LEAST_BYTES_PER_S if bounded else None)
    except TimeoutError as error:
        future.cancel()
        raise MachineError(
            f"{where}: the store does not answer, or takes less than {LEAST_BYTES_PER_S / 1e6:.0f} MB/s"
        ) from error
    except (ValueError, NotImplementedError) as error:  # NotImplementedError: HTTP 501
        raise sentence(error, where, writing=writing) from error


def sentence(error: Exception, where: str, *, writing: bool) -> ResilientError:
    """Return this program's error for a tensorstore error. tensorstore's errors differ only in their text: "STATUS: … [os_error_code='28']
    [http_response_code='403']"."""
    words, status = _words(error), str(error).split(":")[0]
    codes = {name: int(code) for name, code in re.findall(r"\[(\w+)_code='(\d+)'\]", str(error))}
    system, http = codes.get("os_error", 0), codes.get("http_response", 0)
    if system in (errno.ENOSPC, errno.EDQUOT) or status == "RESOURCE_EXHAUSTED":
        return MachineError(f"{where}: no space left. Free some.")
    if status == "ALREADY_EXISTS":
        return SnapshotError(f"{where} holds a slab already; nothing was overwritten")
    if "NoSuchBucket" in words:
        return MachineError(f"{where}: there is no such bucket. Create it, or name another place with --snapshots")
    if http in (400, 401, 403) or "credentials" in words:
        return MachineError(
            f"{where}: the store refuses access ({words}). Check the credentials in the environment, snapshots.endpoint and "
            "snapshots.region"
        )
    if status == "PERMISSION_DENIED":
        reason = os.strerror(system or errno.EACCES)
        return MachineError(f"{where}: {reason}. This user has to be able to use that directory.")
    if status == "ABORTED":
        return MachineError(f"{where}: the store does not answer ({words})")
    if writing:
        return MachineError(f"{where} can't be written: {words}")
    if status not in _DAMAGE or system not in (0, errno.ENOENT, errno.ENOTDIR) or http not in (0, 404, 416):
        return MachineError(f"{where} cannot be read: {words}")
    return SnapshotError(f"{where} is {'missing or incomplete' if status == 'NOT_FOUND' else 'damaged'} ({words})")


def _words(error: Exception) -> str:
    """Return the error's text for people. If the server sent only an HTTP status, return that number."""
    text = str(error)
    words = re.split(r" \[(?:\w+(?:-\w+)*=|source locations)", text)[0].removeprefix("ABORTED: ").rstrip(". ")
    code = re.search(r"http_response_code='(\d+)'", text)
    return f"HTTP {code[1]}" if words == "Unknown" and code else words
