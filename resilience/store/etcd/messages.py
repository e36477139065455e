"""etcd's v3 methods and messages, and the conversion of the store's types to their fields: `method("KV", "Range")` → path, request and
response class.

etcd3 publishes the descriptors inside Python modules that only protobuf ≤ 3.20 can import. Pinning protobuf would downgrade it for
everything else in the user's environment. So this module reads etcd3's modules as text, never executes them, and puts their serialized
descriptors into a private pool. A private pool works with protobuf 3.20 to 7, and cannot clash with another library's pool. Importing this
module raises MachineError if etcd3 is missing or has other files than etcd3 0.12.0.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool

from ...errors import MachineError
from ..protocol import Change, Compare, CreatedAt, Delete, Entry, KeyAbsent, ModifiedAt, Operation, Put, UnchangedSince

_FILES = ("auth_pb2.py", "kv_pb2.py", "rpc_pb2.py")  # each imports only files before it in this tuple
_SERIALIZED = re.compile(r"serialized_pb=_b\(('.*')\)$", re.MULTILINE)


def _load() -> DescriptorPool:
    spec = importlib.util.find_spec("etcd3")  # locates the package without running it
    if spec is None or not spec.submodule_search_locations:
        raise MachineError("the Python package etcd3 is not installed; pip install etcd3==0.12.0")
    folder = Path(spec.submodule_search_locations[0]) / "etcdrpc"
    pool = DescriptorPool()
    for file in _FILES:
        serialized = (
            _SERIALIZED.search((folder / file).read_text(encoding="utf-8")) if (folder / file).exists() else None
        )
        if serialized is None:
            raise MachineError(
                f"no descriptors where etcd3 0.12.0 has them, in {folder / file}; pip install etcd3==0.12.0"
            )
        pool.AddSerializedFile(ast.literal_eval(serialized[1]).encode("latin1"))
    return pool


# Loaded on import, which happens once, because two threads that build stores must share one pool.
_POOL = _load()
_factory: Any = message_factory  # the module's members differ between versions, and no type stub lists them
_class_of = (
    _factory.GetMessageClass
    if hasattr(_factory, "GetMessageClass")
    else _factory.MessageFactory(_POOL).GetPrototype  # protobuf < 4.22
)


@dataclass(frozen=True, kw_only=True)
class Method:
    path: str
    """The path in gRPC's form: /package.Service/Name."""
    request: Any
    response: Any


@cache
def method(service: str, name: str) -> Method:
    found = _POOL.FindServiceByName(f"etcdserverpb.{service}")
    described = found.methods_by_name[name]
    return Method(
        path=f"/{found.full_name}/{name}",
        request=_class_of(described.input_type),
        response=_class_of(described.output_type),
    )


def interval_fields(prefix: str) -> dict[str, bytes]:
    """Return the fields that select every key with this prefix. UTF-8 never ends in 0xff, so the last byte can be incremented."""
    key = prefix.encode()
    if not key:
        return {"key": b"\0", "range_end": b"\0"}
    return {"key": key, "range_end": key[:-1] + bytes([key[-1] + 1])}


def entry_of(found: Any) -> Entry:
    return Entry(
        key=found.key.decode(),
        value=found.value,
        create_revision=found.create_revision,
        mod_revision=found.mod_revision,
        lease=found.lease,
    )


def change_of(event: Any) -> Change:
    deleted = event.type == event.DELETE
    return Change(event.kv.key.decode(), event.kv.mod_revision, None if deleted else entry_of(event.kv))


def compare_fields(compare: Compare) -> dict[str, Any]:
    if isinstance(compare, UnchangedSince):  # if there is no key with this prefix, etcd compares a revision of 0
        return {
            **interval_fields(compare.prefix),
            "target": "MOD",
            "result": "LESS",
            "mod_revision": compare.revision + 1,
        }
    key = compare.key.encode()
    match compare:
        case KeyAbsent():
            return {"key": key, "target": "CREATE", "create_revision": 0}
        case CreatedAt(_, revision):
            return {"key": key, "target": "CREATE", "create_revision": revision}
        case ModifiedAt(_, revision):
            return {"key": key, "target": "MOD", "mod_revision": revision}


def operation_fields(operation: Operation) -> dict[str, Any]:
    match operation:
        case Put(key, value, lease):
            return {"request_put": {"key": key.encode(), "value": value, "lease": lease}}
        case Delete(key):
            return {"request_delete_range": {"key": key.encode()}}
