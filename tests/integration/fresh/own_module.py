"""What a script can see of its own `__main__`, and of who called it: attributes, source, pickle, the frames below it."""

import importlib
import inspect
import linecache
import os
import pickle
import re
import sys
import traceback
import types
import warnings
from importlib.machinery import ModuleSpec

SIMPLE = (str, int, float, bool, bytes, type(None))


def simple(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(simple(item) for item in value)
    return isinstance(value, SIMPLE)


def main(script: dict[str, object]) -> dict[str, object]:
    """The script's own module: attributes, order and kind; what finds it again by name, source or pickle."""
    main = sys.modules["__main__"]
    own = {name: value for name, value in script.items() if re.fullmatch("__.*__", name)}
    thing = script.get("Thing")
    found: dict[str, object] = {
        "names": list(own),
        "values": {name: _shape(value) for name, value in own.items() if name != "__annotations__"},
        "is_globals": main.__dict__ is script,
        "type": type(main).__qualname__,
        "repr": re.sub("0x[0-9a-f]+", "", repr(main)),
        "annotations": {name: _shape(value) for name, value in getattr(thing, "__annotations__", {}).items()},
        "of_module": {name: _shape(value) for name, value in script.get("__annotations__", {}).items()},  # type: ignore[attr-defined]
    }
    if thing is not None:
        found["pickled"] = _tried(lambda: type(pickle.loads(pickle.dumps(thing()))) is thing)  # type: ignore[operator]
        found["source"] = _tried(lambda: inspect.getsource(thing))  # type: ignore[arg-type]
        found["source_file"] = _tried(lambda: inspect.getsourcefile(thing))  # type: ignore[arg-type]
        found["method_file"] = thing.method.__code__.co_filename  # type: ignore[attr-defined]
    found["loader_source"] = _tried(lambda: len(main.__loader__.get_source("__main__")))  # type: ignore[union-attr]
    found["imported_again"] = _tried(lambda: importlib.import_module("__main__") is main)
    found["line"] = _tried(lambda: linecache.getline(str(script.get("__file__")), 1))
    return found


def _shape(value: object) -> object:
    if simple(value):
        return value
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, dict):
        return f"dict of {len(value)}" if len(value) > 20 else "dict"
    if isinstance(value, ModuleSpec):
        return {
            "name": value.name,
            "origin": value.origin,
            "loader": type(value.loader).__qualname__,
            "parent": value.parent,
            "has_location": value.has_location,
            "cached": value.cached,
        }
    text = type(value).__qualname__
    return text + str({k: v for k, v in vars(value).items() if simple(v)} if hasattr(value, "__dict__") else "")


def _tried(what):  # type: ignore[no-untyped-def]
    try:
        return _shape(what())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def stack() -> dict[str, object]:
    """Who called the script: nobody, as it can see."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    below = []
    while frame is not None:
        below.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}")
        frame = frame.f_back

    def deep(n: int) -> int:
        try:
            return deep(n + 1)
        except RecursionError:
            return n

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("from outside of the script", stacklevel=2 + len(inspect.stack()))
    return {
        "below": below[1:],
        "handling": repr(sys.exc_info()[0]),
        "last": hasattr(sys, "last_type"),
        "depth": (deep(0) + len(traceback.extract_stack())) // 4 * 4,
        "warned_at": [f"{w.filename}:{w.lineno}" for w in caught],
    }
