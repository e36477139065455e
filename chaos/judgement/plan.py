"""The plan of a campaign: which faults strike what, and when. It is read from TOML:

    seed = 7

    [[fault]]
    name = "rank_killed"
    rank = 1             # default: the seed chooses. A fault of a node has node = 1, counted from 1, instead
    step = 20            # default: the seed chooses. Or after_s = 0.5, or phase = "restore"
    times = 2            # default: 1
    every_steps = 10     # steps between these times (default: 10)

`after_s` counts from the fault before. `phase` is a phase of the recovery from the fault before.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ...resilience.errors import UsageError
from ...resilience.model.incident import PHASES

ANY = -1
"""A rank, a node or a step that the seed chooses."""
_EVERY_STEPS = 10
_KEYS = {
    "name": str,
    "rank": int,
    "node": int,
    "step": int,
    "after_s": float,
    "phase": str,
    "for_s": float,
    "times": int,
}
_KEYS |= {"every_steps": int}
_NUMBERS = {int: "a whole number", float: "a number", str: "a text in quotes"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a plan must know of a fault."""

    name: str
    says: str
    """A sentence for `--list`."""
    family: str = ""
    """A seed draws from each family equally often."""
    of_a_rank: bool = False
    of_a_node: bool = False
    lasts_s: float = 0.0
    """For how long it lasts if the plan does not say; 0: it is over at once."""
    seeded: bool = True
    """Whether a seed may draw it: every script survives it with the same bits."""
    goes_on: bool = False
    """Training must go on while it lasts, and no rank may be started again because of it."""
    harmless: bool = False
    """No rank may be started again because of it, but it may hold steps up."""
    slows_steps: bool = False
    """It makes steps several times as long, and cuts the node off from etcd. If nodes stand by, one of them may take the node's place."""
    corrupts: bool = False
    """It makes a rank's state, or its snapshot in memory, wrong. So an older snapshot is the right one to start from."""
    found_late: bool = False
    """The state that it makes wrong is found only later, so snapshots after it may be wrong, too."""
    in_place: bool = False
    """The ranks answer it by going back in place, so no rank is started again."""
    spoils_starts: int = 0
    """How many later starts of the ranks fail because of it."""
    parts_nodes: bool = False
    """Because of it, other nodes may take a node for lost or cut off."""

    @property
    def survived(self) -> bool:
        return self.goes_on or self.harmless


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One fault, once."""

    fault: str
    rank: int = ANY
    node: int = ANY
    """Counted from 1."""
    step: int = ANY
    after_s: float | None = None
    phase: str = ""
    for_s: float = 0.0

    @property
    def follows(self) -> bool:
        """Whether its moment depends on the fault before it."""
        return self.after_s is not None or bool(self.phase)

    def __str__(self) -> str:
        target = f" rank {self.rank}" if self.rank != ANY else f" node {self.node}" if self.node != ANY else ""
        lasts = f" for {self.for_s:g} s" if self.for_s else ""
        return f"{self.fault}{target}{lasts} {self.moment}"

    @property
    def moment(self) -> str:
        if self.after_s is not None:
            return f"{self.after_s:g} s after the fault before"
        if self.phase:
            return f"in the phase {self.phase} of the recovery before"
        return f"at step {self.step}" if self.step != ANY else "at a step that the seed chooses"


@dataclass(frozen=True, kw_only=True)
class Plan:
    injections: tuple[Injection, ...]
    seed: int = 0

    def __str__(self) -> str:
        return "\n".join(map(str, self.injections))


def parsed(text: str, kinds: Mapping[str, Kind]) -> Plan:
    """Return the plan that the TOML `text` describes. Raises UsageError."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(f"it is not TOML ({error})") from None
    seed, faults = found.pop("seed", 0), found.pop("fault", [])
    if found:
        raise _wrong(f"{min(found)!r} is not a part of a plan; its parts are seed and [[fault]]")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise _wrong(f"seed is {seed!r}, and must be a whole number of 0 or more")
    if not isinstance(faults, list) or not faults:
        raise _wrong("it names no fault; write each as [[fault]] with a name")
    injections: list[Injection] = []
    for number, entry in enumerate(faults, 1):
        injections += _injections(f"fault {number}", entry, kinds, first=not injections)
    if why := vain(injections, kinds):
        raise _wrong(why)
    return Plan(injections=tuple(injections), seed=seed)


def vain(injections: Sequence[Injection], kinds: Mapping[str, Kind]) -> str:
    """Return why a fault's moment can never come; empty: each can."""
    for before, each in pairwise(injections):
        kind = kinds[before.fault]
        if each.phase and (kind.survived or kind.in_place):
            why = "the ranks go back in place" if kind.in_place else "training survives it"
            return (
                f"{each.fault} waits for the phase {each.phase} of the recovery from {before.fault}, which restarts no rank ({why}); use "
                "after_s"
            )
    return ""


def _injections(where: str, entry: Any, kinds: Mapping[str, Kind], *, first: bool) -> Iterable[Injection]:
    if not isinstance(entry, dict) or "name" not in entry:
        raise _wrong(f'{where} has no name, such as name = "rank_killed"')
    for key, value in entry.items():
        _checked(where, key, value)
    name = entry["name"]
    if name not in kinds:
        raise _wrong(
            f"{where} is {name!r}, which is not a fault{_near(name, kinds)}. mt-resilient chaos --list has all"
        )
    kind = kinds[name]
    moments = [key for key in ("step", "after_s", "phase") if key in entry]
    if len(moments) > 1:
        raise _wrong(f"{where} has both {moments[0]} and {moments[1]}; it can strike at one moment only")
    if first and moments and moments[0] != "step":
        raise _wrong(f"{where} is the first one, so {moments[0]} has no fault before it to refer to")
    if "phase" in entry and entry["phase"] not in PHASES:
        raise _wrong(f"{where}: {entry['phase']!r} is not a phase of a recovery; these are {', '.join(PHASES)}")
    if "rank" in entry and not kind.of_a_rank:
        raise _wrong(f"{where} ({name}) strikes no single rank; leave rank out")
    if "node" in entry and not kind.of_a_node:
        raise _wrong(f"{where} ({name}) strikes no single node; leave node out")
    if "every_steps" in entry and "step" not in entry:
        raise _wrong(f"{where} ({name}) has every_steps without step, from which it counts")
    if "for_s" in entry and not kind.lasts_s:
        raise _wrong(f"{where} ({name}) is over at once; leave for_s out")
    once = Injection(
        fault=name,
        rank=entry.get("rank", ANY),
        node=entry.get("node", ANY),
        step=entry.get("step", ANY),
        after_s=float(entry["after_s"]) if "after_s" in entry else None,
        phase=entry.get("phase", ""),
        for_s=float(entry.get("for_s", kind.lasts_s)),
    )
    every = entry.get("every_steps", _EVERY_STEPS)
    for time in range(entry.get("times", 1)):
        yield replace(once, step=once.step + time * every) if once.step != ANY else once


def _checked(where: str, key: str, value: Any) -> None:
    wanted = _KEYS.get(key)
    if wanted is None:
        raise _wrong(f"{where} has {key!r}, which is not a key{_near(key, _KEYS)}; the keys are {', '.join(_KEYS)}")
    right = isinstance(value, (int, float) if wanted is float else wanted) and not isinstance(value, bool)
    right &= not isinstance(value, float) or math.isfinite(value)
    least = 1 if key in ("times", "every_steps", "node") else 0
    if not right or (wanted is not str and value < least):
        more = "" if wanted is str else f" of {least} or more"
        raise _wrong(f"{where}: {key} is {value!r}, and must be {_NUMBERS[wanted]}{more}")


def fitting(plan: Plan, ranks: int, nodes: int = 1) -> Plan:
    """Return the plan. Raises UsageError if it strikes ranks or nodes that the launch does not have."""
    for injection in plan.injections:
        if injection.rank >= ranks:
            raise _wrong(
                f"{injection.fault} strikes rank {injection.rank}, and the launch has the ranks 0 to {ranks - 1}"
            )
        if injection.node > nodes:
            has = f"the nodes 1 to {nodes}" if nodes > 1 else "one node, unless --nodes gives more"
            raise _wrong(f"{injection.fault} strikes node {injection.node}, and the launch has {has}")
    return plan


def to_toml(plan: Plan) -> str:
    """Return the TOML from which `parsed` makes the plan again."""
    lines = [f"seed = {plan.seed}"]
    for each in plan.injections:
        lines += ["", "[[fault]]", f"name = {json.dumps(each.fault)}"]
        lines += [f"rank = {each.rank}"] if each.rank != ANY else []
        lines += [f"node = {each.node}"] if each.node != ANY else []
        lines += [f"step = {each.step}"] if each.step != ANY and not each.follows else []
        lines += [f"after_s = {each.after_s!r}"] if each.after_s is not None else []
        lines += [f"phase = {json.dumps(each.phase)}"] if each.phase else []
        lines += [f"for_s = {each.for_s!r}"] if each.for_s else []
    return "\n".join(lines) + "\n"


def _near(word: str, words: Collection[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def _wrong(what: str) -> UsageError:
    return UsageError(f"the plan cannot be used: {what}; nothing was started")
