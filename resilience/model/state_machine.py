"""The state machine of a generation (one life of all ranks): phases, events, and a table of the transitions.

In GATHER, every node ends the ranks that it still runs and acknowledges this. In LAUNCH, every node starts its ranks. In RUN, the ranks
train. After RUN, either the job ends, or a fault opens the next generation, in GATHER. `ENDING` lasts until the ranks have exited and the
last snapshot is on disk. A node may be lost together with that snapshot: then the job continues with the next generation. `ENDED` is final.
The table has every pair of phase and event, because a level-triggered controller may see an event again at any tick. `IGNORE`: the event
has no effect in that phase.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    GATHER = "gather"
    LAUNCH = "launch"
    RUN = "run"
    ENDING = "ending"
    ENDED = "ended"


class Event(StrEnum):
    READY = "no member has anything of an older generation left"
    RUNNING = "every member's ranks are attached"
    FAULT = "a verdict after which the job can recover"
    FINISHED = "every rank has left its loop normally"
    STOP = "somebody asked the job to stop"
    GIVE_UP = "a verdict after which the job cannot recover, or a spent budget"
    MEMBERS = "other nodes are to train"
    GONE = "every member has reported that its worker group is gone"


class Move(StrEnum):
    """What the controller does with the generation record besides setting the new phase."""

    IGNORE = "ignore"
    ADVANCE = "advance"
    REOPEN = "reopen"
    """Open the next generation, in phase GATHER."""


TABLE: dict[tuple[Phase, Event], tuple[Move, Phase]] = {
    (Phase.GATHER, Event.READY): (Move.ADVANCE, Phase.LAUNCH),
    (Phase.GATHER, Event.RUNNING): (Move.IGNORE, Phase.GATHER),
    (Phase.GATHER, Event.FAULT): (Move.REOPEN, Phase.GATHER),
    (Phase.GATHER, Event.FINISHED): (Move.IGNORE, Phase.GATHER),
    (Phase.GATHER, Event.STOP): (Move.ADVANCE, Phase.ENDING),
    (Phase.GATHER, Event.GIVE_UP): (Move.ADVANCE, Phase.ENDING),
    (Phase.GATHER, Event.GONE): (Move.IGNORE, Phase.GATHER),
    (Phase.GATHER, Event.MEMBERS): (Move.REOPEN, Phase.GATHER),
    (Phase.LAUNCH, Event.READY): (Move.IGNORE, Phase.LAUNCH),
    (Phase.LAUNCH, Event.RUNNING): (Move.ADVANCE, Phase.RUN),
    (Phase.LAUNCH, Event.FAULT): (Move.REOPEN, Phase.GATHER),
    (Phase.LAUNCH, Event.FINISHED): (Move.ADVANCE, Phase.ENDING),
    (Phase.LAUNCH, Event.STOP): (Move.ADVANCE, Phase.ENDING),
    (Phase.LAUNCH, Event.GIVE_UP): (Move.ADVANCE, Phase.ENDING),
    (Phase.LAUNCH, Event.GONE): (Move.IGNORE, Phase.LAUNCH),
    (Phase.LAUNCH, Event.MEMBERS): (Move.IGNORE, Phase.LAUNCH),
    (Phase.RUN, Event.READY): (Move.IGNORE, Phase.RUN),
    (Phase.RUN, Event.RUNNING): (Move.IGNORE, Phase.RUN),
    (Phase.RUN, Event.FAULT): (Move.REOPEN, Phase.GATHER),
    (Phase.RUN, Event.FINISHED): (Move.ADVANCE, Phase.ENDING),
    (Phase.RUN, Event.STOP): (Move.ADVANCE, Phase.ENDING),
    (Phase.RUN, Event.GIVE_UP): (Move.ADVANCE, Phase.ENDING),
    (Phase.RUN, Event.GONE): (Move.IGNORE, Phase.RUN),
    (Phase.RUN, Event.MEMBERS): (Move.REOPEN, Phase.GATHER),
    (Phase.ENDING, Event.READY): (Move.IGNORE, Phase.ENDING),
    (Phase.ENDING, Event.RUNNING): (Move.IGNORE, Phase.ENDING),
    (Phase.ENDING, Event.FAULT): (Move.REOPEN, Phase.GATHER),
    (Phase.ENDING, Event.FINISHED): (Move.IGNORE, Phase.ENDING),
    (Phase.ENDING, Event.STOP): (Move.IGNORE, Phase.ENDING),
    (Phase.ENDING, Event.GIVE_UP): (Move.IGNORE, Phase.ENDING),
    (Phase.ENDING, Event.GONE): (Move.ADVANCE, Phase.ENDED),
    (Phase.ENDING, Event.MEMBERS): (Move.IGNORE, Phase.ENDING),
    **{(Phase.ENDED, event): (Move.IGNORE, Phase.ENDED) for event in Event},
}
