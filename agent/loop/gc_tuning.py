"""Python's search for cycles, in the process of an agent: seldom, and among what is new alone.

It walks over all records that are known, and begins where many have come: in the middle of a change, for 150 ms with 10,000 nodes. What an
agent makes is records, which hold no cycles and are freed as soon as others take their place. A few exceptions do.
"""

from __future__ import annotations

import gc

NEW = 50_000
"""Objects that were made and not freed since the last search: cycles hold some 10 MB at the most. Going over so many takes 20 to 40 ms."""
SELDOM = 1_000
"""Searches, until one goes over what they have left as well: never, in a life."""


def search_seldom() -> None:
    gc.set_threshold(NEW, SELDOM, SELDOM)
