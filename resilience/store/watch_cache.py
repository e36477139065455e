"""A local copy of everything under one prefix, kept up to date by a watch. A loop reads it many times a second without asking the store.

    store ──listing──▶ Mirror ──entries()──▶ the controller, or an agent that obeys
      └─────watch──────▲ └──fds()──────────▶ poll: a change has arrived

The copy always shows one revision, because all changes of a revision come together. The copy may be stale, and only the store can tell. So
a writer that relies on the copy puts what it read as compares into its transaction (ModifiedAt, UnchangedSince). Each read of the copy
includes every earlier write that was made through the same store.
"""

from __future__ import annotations

from collections.abc import Mapping

from .poll import readable
from .protocol import Entry, HistoryGone, Store, Watch

_PATIENCE_S = 0.2
"""If a write of our own has not arrived through the watch, the prefix is listed after this many seconds without any change. A change
arrives within a few milliseconds, or later if thousands of other changes come first."""


class Mirror:
    """A local copy for one thread. The copy has no file descriptor before the first call of `entries`, and none after `close`."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self.prefix = prefix
        self.revision = 0
        """Revision that the copy shows."""
        self._entries: dict[str, Entry] = {}
        self._changed: dict[str, bytes | None] = {}
        self._watch: Watch | None = None
        self._old = True

    def entries(self) -> Mapping[str, Entry]:
        """Return everything under the prefix as of `revision`, unsorted. A later call may change and return the same object. Raises
        StoreUnavailable if the prefix must be listed and cannot be. A broken watch alone raises nothing."""
        if self._watch is None or self._old or self._watch.doubtful:
            self._list()
        known = self._follow()
        if not known or (self._watch and self._watch.owed > self.revision and not self._wait(self._watch)):
            self._list()
        return self._entries

    def changed(self) -> dict[str, bytes | None]:
        """Return the values that have changed in the copy since the last call, by key; None: deleted. The first call returns all values."""
        changed, self._changed = self._changed, {}
        return changed

    def doubt(self) -> None:
        """Make the next read list the prefix, because the store has shown that the copy is stale."""
        self._old = True

    def fds(self) -> tuple[int, ...]:
        """Return file descriptors that become readable when a change has arrived."""
        return (self._watch.fileno(),) if self._watch else ()

    def close(self) -> None:
        if self._watch:
            self._watch.close()
            self._watch = None

    def _list(self) -> None:
        if self._watch:
            self._watch.doubtful = False  # before the listing, so that a later write without an answer sets it again
        try:
            found = self._store.listing(self.prefix)
        except BaseException:
            self._old = True
            raise
        self._changed |= {key: None for key in self._entries if key not in found.entries}
        for key, entry in found.entries.items():
            # Compare entries, not revisions: a store restored from a backup continues from the backup's revision.
            if self._entries.get(key) != entry:
                self._changed[key] = entry.value
        self._entries, self.revision, self._old = found.entries, found.revision, False
        if self._watch is None:
            self._watch = self._store.watch(self.prefix, found.revision)

    def _follow(self) -> bool:
        """Apply the changes that have arrived. Return False if the store no longer has the changes in between."""
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
        """Wait for our own newest write to arrive. Return False if no change arrives."""
        while watch.owed > self.revision:
            if not readable([watch.fileno()], _PATIENCE_S) or not self._follow():
                return False
        return True
