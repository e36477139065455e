"""Turn what a snapshot stores into a script's values. Live objects stay the same objects, filled in place, wherever possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ....checkpoint.arena.staging import flat, lying
from ....checkpoint.format.pytree import Tagged
from ....checkpoint.format.pytree_walk import PLAIN, text
from ....resilience.errors import LayoutError, SnapshotError
from . import array_views
from .borrowed_memory import Lenders, Loans, memory_again
from .class_adapters import NotFound, kind_of, tagged
from .packing import MAPPINGS
from .session_parts import Parts
from .sharded_tensors import restore_sharded
from .shared_objects import Before

_BY_NAME = {name: kind for kind, name in MAPPINGS.items()}


class Unpacking:
    """One restore of one source (an object that the Session saves)."""

    def __init__(
        self,
        name: str,
        sources: Mapping[str, Any],
        before: Before | None = None,
        loans: Loans | None = None,
        parts: Parts | None = None,
    ) -> None:
        """before: what other sources have restored. loans: memory that other sources lend. Live values that lie in lent memory are not
        filled. parts: the modules to which values refer."""
        self._parts = Parts(Lenders()) if parts is None else parts
        self._name, self._sources, self._loans = name, sources, Loans(Lenders()) if loans is None else loans
        self.made: list[Any] = []
        self.given: tuple[Any, frozenset[int]] = None, frozenset()
        """The source's own live object, which is filled wherever it fits, and the ids of other sources' objects, which are not filled."""
        self.began: Mapping[int, Any] | None = None
        """The tensors and arrays that the source had when the loop began, by id; None if they are not known."""
        self._theirs, self._taken, self._lain_in = before or ({}, set(), set())
        """The objects that other sources have restored; the ids of live objects in use, which `made` keeps alive; and the addresses of
        memory in use."""

    def unpack(self, kept: Any, live: Any) -> Any:
        """Return the value that `kept` describes. Where possible it is `live`, filled. Raises LayoutError or SnapshotError."""
        try:
            return self._up(kept, live)
        except NotFound as error:
            raise LayoutError(f"{self._name} cannot be restored: {error}") from None
        except Exception as error:  # the snapshot is damaged, or a class of the script refuses its state
            raise SnapshotError(
                f"{self._name} cannot be rebuilt from the snapshot ({type(error).__name__}: {error})"
            ) from error

    def _up(self, kept: Any, live: Any) -> Any:
        kind = type(kept)
        if kind in PLAIN:
            return kept
        if kind is Tagged:
            tag, content = kept
            return self._tagged(tag, content, live)
        if kind is tuple:
            hints = live if isinstance(live, tuple) else ()
            return tuple(self._up(item, hints[at] if at < len(hints) else None) for at, item in enumerate(kept))
        if kind is list:
            return self._list(kept, live)
        if kind in MAPPINGS:
            return self._mapping(kind, list(kept), kept.values(), live)
        return self._elements(kept, live)

    def _own(self, live: Any) -> Any:
        """Return `live`, and mark it as in use."""
        self.made.append(live)
        self._taken.add(id(live))
        return live

    def _used(self, live: Any) -> bool:
        return id(live) in self._taken or id(live) in self.given[1]

    def _free(self, live: Any, kind: type) -> bool:
        if type(live) is not kind or self._used(live):
            return False
        return not (self._loans and id(live) in self._loans.mappings())

    def _list(self, kept: Any, live: Any) -> Any:
        found = self._own(live if self._free(live, list) else [])
        if PLAIN.issuperset(map(type, kept)):
            found[:] = kept
            return found
        known = len(found)
        found[:] = [self._up(item, found[at] if at < known else None) for at, item in enumerate(kept)]
        return found

    def _mapping(self, kind: Any, keys: Any, values: Any, live: Any) -> Any:
        found = self._own(live if self._free(live, kind) else kind())
        if kind is dict and PLAIN.issuperset(map(type, values)):
            found.clear()
            found.update(zip(keys, values, strict=True))
            return found
        before = dict(found)
        pairs = [(key, self._up(item, before.get(key))) for key, item in zip(keys, values, strict=True)]
        found.clear()
        for key, item in pairs:
            found[key] = item
        return found

    def _elements(self, kept: Any, live: Any) -> Any:
        if type(kept) is np.ndarray:
            found = self._fillable(live)
            fits = array_views.takes_array(found, kept.dtype, kept.shape, kept.strides)
            if fits:
                found[...] = kept
            return self._lies(found if fits else kept)
        return self._lies(array_views.restore_tensor({"data": kept}, self._fillable(live)))

    def _fillable(self, live: Any) -> Any:
        """Return `live` if it may be filled, else None. A part of a larger memory that came after the loop began is not filled: it may be a
        row of the script's data, as after `state["last"] = data[i]`."""
        if not self._alone(live):
            return None
        stays = self.began is None or live is self.given[0] or id(live) in self.began
        return live if stays or not array_views.is_part(live) else None

    def _alone(self, live: Any) -> bool:
        if not isinstance(live, (np.ndarray, *array_views.TENSORS)) or self._used(live):
            return False
        if not isinstance(live, np.ndarray) and live.layout is not torch.strided:
            return False
        lies_in = array_views.address(live)
        return (live is self.given[0] or lies_in not in self._lain_in) and not (
            self._loans and self._loans.of(live, lies_in)
        )

    def _lies(self, thing: Any) -> Any:
        if where := array_views.address(thing):
            self._lain_in.add(where)
        return self._own(thing)

    def _tagged(self, tag: str, content: Any, live: Any) -> Any:
        match tag:
            case "alias":
                return self.made[content]
            case "theirs":
                source, number = content
                return self._theirs[source][number]
            case "lent":
                return self._loans.find(*content)
            case "memory":
                return self._own(memory_again(self._loans, content))
            case "source":
                if content not in self._sources:
                    raise NotFound(f"it refers to {content}, which does not exist at the start of this run")
                return self._sources[content]
            case "part":
                return self._parts.find(*content)
            case "id":  # the id of an optimizer's parameter, given by its position, or of the object in `content`
                return id(self._sources[content] if type(content) is str else self._up(content, None))
            case "keys":
                name, keys, values = content
                return self._mapping(_BY_NAME[name], self._up(keys, None), values, live)
            case "tensor":
                return self._lies(array_views.restore_tensor(content, self._fillable(live)))
            case "array":
                return self._lies(array_views.restore_array(content, self._fillable(live)))
            case "sharded":
                free = None if self._used(live) or id(live) in self._loans.mappings() else live
                return self._own(restore_sharded(content, free, self._parts.tensors()))
            case "view":
                return self._view(content, live)
        return self._other(tag, content, live)

    def _view(self, content: Any, live: Any) -> Any:
        number = len(self.made)
        self._own(None)
        hint = None
        if isinstance(live, (np.ndarray, *array_views.TENSORS)) and type(content["memory"]) is not Tagged:
            hint = array_views.memory_of(live) if self._alone(live) else None
        memory = self._up(content["memory"], hint)
        free = isinstance(live, (np.ndarray, *array_views.TENSORS)) and not self._used(live)
        found = array_views.restore_view({**content, "memory": memory}, live if free else None)
        self.made[number] = found
        self._taken.add(id(found))
        return found

    def _other(self, tag: str, content: Any, live: Any) -> Any:
        kind = tagged(tag, content)
        alike = kind_of(type(live)) is kind
        if kind.moves:
            number = len(self.made)
            self._own(None)
            self.made[number] = found = kind.make(self._up(content, None))
            return found
        if kind.fill is None:
            return kind.make(self._up(content, kind.save(live) if alike else None))
        fits = alike and not self._used(live) and kind.fits(live, content)
        found = self._own(live if fits else kind.make(content))
        kind.fill(found, self._up(content, kind.save(found) if fits else None))
        return found


def difference(kept: Any, again: Any, place: str) -> str:
    """Return the path at which two packed values differ; empty if they are equal."""
    if kept is again:
        return ""
    if type(kept) is not type(again):
        return place
    if isinstance(kept, (torch.Tensor, np.ndarray)):
        return "" if _same_memory(kept, again) or _bits(kept) == _bits(again) else place
    if isinstance(kept, dict):
        if list(kept) != list(again):
            return place
        return next((w for key in kept if (w := difference(kept[key], again[key], f"{place}[{key!r:.40}]"))), "")
    if type(kept) is Tagged and kept[0] in ("set", "frozenset"):
        return "" if _members(kept) == _members(again) else place
    if isinstance(kept, (list, tuple)):
        if len(kept) != len(again):
            return place
        inside = enumerate(zip(kept, again, strict=True))
        named = type(kept) is not Tagged
        return next((w for n, pair in inside if (w := difference(*pair, f"{place}[{n}]" if named else place))), "")
    return "" if text(kept) == text(again) else place


def _members(packed: Any) -> str:
    """Return a text that is the same for equal sets, however they list their members."""
    if type(packed) is Tagged and packed[0] in ("set", "frozenset"):
        return f"{packed[0]} {sorted(map(_members, packed[1]))}"
    if isinstance(packed, tuple):
        return str([*map(_members, packed)])
    return f"{type(packed).__name__} {packed!r}"


def _same_memory(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return False
    one_lies, other_lies = ((each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (one, other))
    return bool(one_lies == other_lies)


def _bits(thing: Any) -> Any:
    if isinstance(thing, np.ndarray):
        return thing.dtype, thing.shape, thing.tobytes()
    content = flat(thing)
    return thing.dtype, thing.shape, lying(content).tobytes()


def merged(fresh: Any, loaded: Any, kept: Any) -> Any:
    """Return `kept`, with the parts that a load has changed replaced by those in `loaded`. All three are packed values: `fresh` from before
    the load, `loaded` from after it."""
    if loaded is None or not difference(fresh, loaded, "it"):
        return kept
    if type(kept) is Tagged and type(loaded) is type(fresh) is Tagged and kept[0] == loaded[0] == fresh[0]:
        return Tagged((kept[0], merged(fresh[1], loaded[1], kept[1])))
    if type(kept) is type(loaded) is type(fresh) is dict:
        untouched = {name for name in loaded if name in fresh and not difference(fresh[name], loaded[name], "it")}
        found = {name: merged(fresh.get(name), loaded.get(name), each) for name, each in kept.items()}
        return {**found, **{name: each for name, each in loaded.items() if name not in kept and name not in untouched}}
    if type(kept) is type(loaded) is type(fresh) is list and len(kept) == len(loaded) == len(fresh):
        return [*map(merged, fresh, loaded, kept)]
    return loaded
