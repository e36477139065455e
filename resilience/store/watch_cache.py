"""A picture of everything under one prefix, kept up to date by a watch. A loop reads it many times a second without asking the store.

    store ──listing──▶ Mirror ──entries()──▶ the controller, or an agent that obeys
      └─────watch──────▲ └──fds()──────────▶ poll: a change has arrived

The picture always shows one revision, because all changes of a revision come together. It may be old, and only the store can tell. So a
writer that relies on it compares what it read in the same transaction (ModifiedAt, UnchangedSince). A reader that needs the present state
calls `fresh`. At the next look, the picture has every write that was made through the same store.
"""

from __future__ import annotations

from collections.abc import Mapping

from .poll import readable
from .protocol import Entry, HistoryGone, Store, Watch

_PATIENCE_S = 0.2
"""While the watch owes a write of our own, the prefix is listed after this time without any change. A change takes a few milliseconds;
behind thousands of others' changes it takes longer."""


class Mirror:
    """A picture for one thread. It holds no descriptor before the first call of `entries`, and none after `close`."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self.prefix = prefix
        self.revision = 0
        """Revision of the picture."""
        self._entries: dict[str, Entry] = {}
        self._changed: dict[str, bytes | None] = {}
        self._watch: Watch | None = None
        self._old = True

    def entries(self) -> Mapping[str, Entry]:
        """Return everything under the prefix as of `revision`, in no order. A later call may change and return the same object. Raises
        StoreUnavailable if the prefix must be listed and cannot be. A broken watch alone raises nothing."""
        if self._watch is None or self._old or self._watch.doubtful:
            self._list()
        known = self._follow()
        if not known or (self._watch and self._watch.owed > self.revision and not self._wait(self._watch)):
            self._list()
        return self._entries

    def changed(self) -> dict[str, bytes | None]:
        """Return the values that have changed in the picture since the last call, by key; None: deleted. The first call returns all."""
        changed, self._changed = self._changed, {}
        return changed

    def fresh(self) -> Mapping[str, Entry]:
        """Return the same as `entries`, no older than this call. Raises StoreUnavailable."""
        self._list()
        return self._entries

    def doubt(self) -> None:
        """Have the prefix listed at the next look, because the store has shown that the picture is old."""
        self._old = True

    def fds(self) -> tuple[int, ...]:
        """Return descriptors that become readable when a change has arrived."""
        return (self._watch.fileno(),) if self._watch else ()

    def close(self) -> None:
        if self._watch:
            self._watch.close()
            self._watch = None

    def _list(self) -> None:
        if self._watch:
            self._watch.doubtful = False  # before the listing: a write without an answer from now on is in doubt again
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
        """Apply the changes that have arrived. Return False if the store has forgotten the missing ones."""
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
        """Wait for our own newest write. Return False if no change arrives."""
        while watch.owed > self.revision:
            if not readable([watch.fileno()], _PATIENCE_S) or not self._follow():
                return False
        return True
