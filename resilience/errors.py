"""The tree of error classes, split by who must act. Each class has an exit code.

    ResilientError
    ├── UserError            the person at the terminal changes something and starts again
    │   ├── UsageError         2   an option, a configuration key or the wrapped command is wrong
    │   ├── LayoutError        2   the snapshot is of another model, or of another number of ranks (raised by a rank)
    │   ├── StateError         2   an object that the script gives to its Session can't be saved (raised by a rank)
    │   ├── FormatError        2   another version of this program has written the snapshot
    │   └── ScriptError        5   the wrapped script fails twice in the same way, after its loop or before the command's first step
    ├── SiteError            the person who runs this machine or cluster acts
    │   ├── MachineError       3   torchrun is missing, a directory can't be written, or memory is short
    │   ├── NodeUnfit          8   this machine failed a check before it joined (`--preflight`)
    │   ├── SilentCorruption   7   the replicas of this machine's ranks diverge again and again
    │   └── StoreUnavailable   4   etcd does not answer
    │       ├── StoreRefused           etcd answers, and refuses what this agent asks: waiting does not help
    │       └── LeaseGone              (resilience/store/protocol.py) etcd answers that our lease has expired
    ├── SnapshotError       6   one snapshot, or every snapshot, is missing or damaged
    ├── BudgetSpent         93   too many recoveries without progress; the newest stable snapshot is kept (NVRx uses 93 as well)
    └── InternalError       70   a bug in this program: report it

An error's message says what happened, what the program did about it, and what to do next.
"""

from __future__ import annotations


class ResilientError(Exception):
    exit_code = 70


class UserError(ResilientError):
    exit_code = 2


class UsageError(UserError):
    exit_code = 2


class LayoutError(UserError):
    exit_code = 2


class StateError(UserError):
    exit_code = 2


class FormatError(UserError):
    exit_code = 2


class ScriptError(UserError):
    exit_code = 5


class SiteError(ResilientError):
    exit_code = 3


class MachineError(SiteError):
    exit_code = 3


class StoreUnavailable(SiteError):
    exit_code = 4


class StoreRefused(StoreUnavailable):
    pass


class NodeUnfit(SiteError):
    exit_code = 8


class SilentCorruption(SiteError):
    exit_code = 7


class SnapshotError(ResilientError):
    exit_code = 6


class BudgetSpent(ResilientError):
    exit_code = 93


class InternalError(ResilientError):
    exit_code = 70
