"""Makes Python's garbage collection in the agent's process rare, and limits it to new objects.

By default it walks over all known records, and starts when many have come. That is in the middle of a change, for 150 ms with 10,000 nodes.
An agent makes records, which hold no cycles and are freed when newer ones take their place. Only a few exceptions hold cycles.
"""

from __future__ import annotations

import gc

NEW = 50_000
"""A collection starts after so many new objects that were not freed. Cycles hold at most some 10 MB. The collection takes 20 to 40 ms."""
SELDOM = 1_000
"""Collections until one also covers what earlier ones have left: never, in an agent's life."""


def search_seldom() -> None:
    gc.set_threshold(NEW, SELDOM, SELDOM)
