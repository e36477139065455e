"""Makes Python's garbage collection in the agent's process rare, and limits it to new objects.

By default, a collection starts after many new objects, in the middle of a change, and scans all known records. With 10,000 nodes, a
collection takes 150 ms. An agent creates records, which contain no reference cycles and are freed when newer records replace them. Only a
few exceptions contain cycles.
"""

from __future__ import annotations

import gc

NEW = 50_000
"""A collection starts after this many new objects that were not freed. Cycles occupy at most about 10 MB. The collection takes 20 to 40
ms."""
SELDOM = 1_000
"""Number of collections before a collection also scans objects that survived earlier ones. An agent never reaches it."""


def search_seldom() -> None:
    gc.set_threshold(NEW, SELDOM, SELDOM)
