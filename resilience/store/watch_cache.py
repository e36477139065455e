"""The picture of everything under one prefix, kept up to date by a watch: what a loop reads many times a second without asking the store.

    store ──listing──▶ Mirror ──entries()──▶ whoever decides, or obeys
      └─────watch──────▲ └──fileno()───────▶ poll: something has come

The picture is always that of one revision, because all changes of a revision come together. How old it is nobody can know who does not ask,
so whoever writes upon it compares what it rests on in the same transaction (ModifiedAt, UnchangedSince), and whoever wants to know asks for
`fresh`. What was written through the same store is in it, the next time it is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

from .poll import readable
from .protocol import Entry, HistoryGone, Store, Watch

_PATIENCE_S = 0.2
"""How long nothing at all may come through the watch, which takes a few milliseconds, while a write of our own is owed, before the prefix
is listed. Behind thousands of others' changes it comes later."""


class Mirror:
    """For one thread. It holds no descriptor before `entries` was asked for the first time, and none after `close`."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self.prefix = prefix
        self.revision = 0
        """Of the picture."""
        self._entries: dict[str, Entry] = {}
        self._changed: dict[str, bytes | None] = {}
        self._watch: Watch | None = None
        self._old = True

    def entries(self) -> Mapping[str, Entry]:
        """Everything under the prefix as of `revision`, in no order; the same object at each call, changed in place. Raises
        StoreUnavailable where it has to be listed and cannot; that the watch is broken it does not tell."""
        if self._watch is None or self._old or self._watch.doubtful:
            self._list()
        known = self._follow()
        if not known or (self._watch and self._watch.owed > self.revision and not self._wait(self._watch)):
            self._list()
        return self._entries

    def changed(self) -> dict[str, bytes | None]:
        """Values that have changed in the picture since this was asked last, by key; at first, all. None: not there any more."""
        changed, self._changed = self._changed, {}
        return changed

    def fresh(self) -> Mapping[str, Entry]:
        """The same, no older than this call. Raises StoreUnavailable."""
        self._list()
        return self._entries

    def doubt(self) -> None:
        """The store has shown that the picture is old: it is listed the next time."""
        self._old = True

    def fds(self) -> tuple[int, ...]:
        """What becomes readable when something has come."""
        return (self._watch.fileno(),) if self._watch else ()

    def close(self) -> None:
        if self._watch:
            self._watch.close()
            self._watch = None

    def _list(self) -> None:
        if self._watch:
            self._watch.doubtful = False  # before the listing: what is left unanswered from now on is in doubt again
        try:
            found = self._store.listing(self.prefix)
        except BaseException:
            self._old = True
            raise
        self._changed |= {key: None for key in self._entries if key not in found.entries}
        for key, entry in found.entries.items():
            # A store that was restored from a backup counts its revisions anew from there.
            if self._entries.get(key) != entry:
                self._changed[key] = entry.value
        self._entries, self.revision, self._old = found.entries, found.revision, False
        if self._watch is None:
            self._watch = self._store.watch(self.prefix, found.revision)

    def _follow(self) -> bool:
        """Put in what has come since; False where the store has forgotten what is missing."""
        assert self._watch
        listed = self.revision
        try:
            for change in self._watch.take():
                if change.revision <= listed:
                    continue
                if change.entry is None:
                    self._entries.pop(change.key, None)
                    self._changed[change.key] = None
                else:
                    self._entries[change.key] = change.entry
                    self._changed[change.key] = change.entry.value
                self.revision = change.revision
        except HistoryGone:
            self.close()
            return False
        return True

    def _wait(self, watch: Watch) -> bool:
        """For our own newest write; False where nothing comes."""
        while watch.owed > self.revision:
            if not readable([watch.fileno()], _PATIENCE_S) or not self._follow():
                return False
        return True
