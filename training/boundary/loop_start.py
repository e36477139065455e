"""What a rank checks and reports when its training loop begins, and at its first boundary (after its first step)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...checkpoint.backend import place
from ...resilience.clock import monotonic_ns, sleep
from ...resilience.errors import UsageError
from ...resilience.inprocess.tally import Wanted
from ...resilience.ipc.page_validation import MOST
from ...resilience.model.data_windows import Window
from ...resilience.text import formatting
from ..attach import marks
from ..attach.attach import Attachment
from ..attach.rank_stderr import say
from ..live_instances import live_instances
from ..snapshot.snapshots import Tape
from ..state.modules.module_source import Modules
from ..state.optimizers.nested_optimizers import held_by, state_of
from ..state.optimizers.optimizers import Optimizers
from ..state.sources import Source
from ..state.values.borrowed_memory import Lenders
from ..state.values.session_parts import Parts
from ..state.values.value_source import Stateful
from ..warm import imported_modules
from .lineage import Course, obey

_FETCHING_S = 0.005
"""Seconds between two polls while ranks wait for their part of the state to arrive from another node."""


def unless_looped(at: Attachment | None) -> Attachment | None:
    """Return `at`; None if this process has already begun a loop. The second loop's steps and snapshots would be mistaken for the first
    loop's."""
    if at is None or not at.page.restored_ns:
        return at
    if at.local_rank == 0:
        say(
            "this script has begun a second training loop, and only the first one is watched. The second takes no snapshots: "
            "after a fault it starts again from its beginning. To watch both, run them as one loop: "
            "for step in session.steps(first + second)"
        )
    return None


def restore(at: Attachment, tape: Tape, course: Course, *, known_data: bool) -> int | None:
    """Restore the state that the agent chose for this generation. Return its step; None: there is no such state."""
    handoff = at.handoff
    if handoff.resume_step < 0 and not handoff.origin:
        return None
    if handoff.resume_step < 0:
        tape.owed = Wanted.ON_DISK  # write the job's own snapshot to disk as soon as possible
        step = tape.restorer.start_from(place.at(handoff.origin))
    else:
        step = handoff.resume_step
        started = monotonic_ns()
        while at.page.fetching:
            sleep(_FETCHING_S)
        tape.rewinds += handoff.rewind is not None
        tape.go_back(step, handoff.rewind.left if handoff.rewind else "", handoff.resume_course)
        if handoff.rewind is not None:
            tape.keep(step)  # as after an ordered rewind in place
            obey(handoff.rewind, course, at, started, known_data=known_data)
            return step
    course.went_back(step)
    return step


def length(at: Attachment, course: Course, asked: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return how many steps and epochs the loop runs in total. asked: what the script asks for now. A script that resumes by itself asks
    only for what remains after its own checkpoint, but a recovery counts from the beginning. So while at least one agent of the earlier run
    is alive, the loop runs no fewer steps than before. A new command may bring another script, and its number counts."""
    found, before = dict(asked), course.asked_before if at.handoff.resume_step >= 0 else {}
    for what, now in asked.items():
        earlier = before.get(what)
        if now is None or earlier is None or now >= earlier:
            continue
        if set(before["agents"]) & set(at.handoff.agents):
            found[what] = earlier
            done = f"Before the recovery it asked for {earlier}, and training continues up to that number"
        else:
            done = f"Before, it asked for {earlier}. Training now ends after {now}, counting those before the snapshot"
        tell(
            at,
            f"the script asks for {now} {what} in all. {done}. A script that resumes must not subtract the {what} of its "
            f"own checkpoint: always ask for all {what}. The session continues from its snapshot by itself (docs/data.md)",
        )
    course.asked = {"agents": [*at.handoff.agents], **found}
    return found


def shown(total: object) -> int:
    """Return the number of steps of the whole loop, as the page shows it; 0: it has no end, or it is not known."""
    return int(total) if isinstance(total, int | float) and 0 < total <= MOST else 0


def tell_of_what_is_missing(at: Attachment, sources: Collection[Source]) -> list[Optimizer | LRScheduler]:
    """After the first step, name the optimizers, schedulers and hooks that change in the training but are in no snapshot. Return the
    optimizers and schedulers. After a recovery, nothing is searched for, named or returned: the search takes 0.15 s, and the job's first
    start has named all such objects."""
    if at.handoff.resume_step >= 0:
        return []
    found = live_instances(DistributedDataParallel, Optimizer, LRScheduler)
    models = [source for source in sources if isinstance(source, Modules)]
    wrappers = [each for each in found if isinstance(each, DistributedDataParallel)]
    strangers = [*_strangers([each for each in found if isinstance(each, Optimizer)], models, sources)]
    for optimizer in strangers:
        tell(
            at,
            f"the Session was not given the optimizer {type(optimizer).__name__}, which has stepped parameters of its model. If the loop "
            "uses it, a recovery continues with a fresh one, and gives other results. Then give it: Session(…, optimizer=optimizer)",
        )
    forgotten = [*_forgotten([each for each in found if isinstance(each, LRScheduler)], sources)]
    for scheduler in forgotten:
        tell(
            at,
            f"the Session was not given the scheduler {type(scheduler).__name__} of its optimizer. If the loop uses it, a recovery "
            "continues with a fresh one, and with other learning rates. Then give it: Session(…, scheduler=scheduler)",
        )
    for hook in filter(None, (model.hooked(wrappers) for model in models)):
        tell(
            at,
            f"the communication hook {hook} of DistributedDataParallel has a state that no snapshot contains. If it keeps values from "
            "step to step, as PowerSGD does, a recovered training ends with other bits",
        )
    return [*strangers, *forgotten]


def _forgotten(schedulers: Iterable[LRScheduler], sources: Collection[Source]) -> Iterator[LRScheduler]:
    """Yield schedulers of the sources' optimizers that are neither sources (objects that the Session saves) nor belong to one."""
    things = [source.thing for source in sources if isinstance(source, Stateful)]
    if not all(isinstance(thing, LRScheduler) for thing in things):
        return  # such an object may contain a scheduler, however deep, and save it
    parts = (part for source in sources if isinstance(source, Optimizers) for part in source.parts())
    optimizers = {id(each): each for _, *both in parts for each in both}
    held, labels = {id(thing) for thing in things}, Parts(Lenders())
    within = (held_by(each, LRScheduler, labels) for each in optimizers.values() if isinstance(each, Optimizer))
    held |= {id(thing) for found in within for _, thing in found}
    held |= {id(each) for thing in schedulers for each in getattr(thing, "_schedulers", ())}
    yield from (
        each for each in schedulers if id(each) not in held and id(getattr(each, "optimizer", None)) in optimizers
    )


def _strangers(
    optimizers: Iterable[Optimizer], models: Collection[Modules], sources: Collection[Source]
) -> Iterator[Optimizer]:
    """Yield optimizers that have state for parameters of the models, and that belong to no source."""
    parts = [
        each for source in sources if isinstance(source, Optimizers) for _, *both in source.parts() for each in both
    ]
    saved_by_others = [source.thing for source in sources if isinstance(source, Stateful)]
    if not all(isinstance(thing, LRScheduler) for thing in saved_by_others):
        return  # such an object may contain an optimizer, however deep, and save it
    states = (state_of(each) for each in parts if isinstance(each, Optimizer))
    known = {*map(id, parts), *map(id, states)}
    trained = {id(parameter) for model in models for chunk in model.chunks for parameter in chunk.parameters()}
    for each in optimizers:
        if not known.intersection((id(each), id(state_of(each)))) and not trained.isdisjoint(map(id, state_of(each))):
            yield each


def first_boundary(at: Attachment, windows: Collection[Window], cure: str, puts_back: bool = False) -> None:
    """Check what is known only after the loop's first step. windows: the data to be skipped. cure: what to do if it is unknown which data a
    step uses; otherwise empty. puts_back: a recovery restores the position in the data all the same. Raises UsageError."""
    if windows and cure:
        raise UsageError(
            f"{', '.join(map(formatting.batches, windows))} of the data are to be skipped, but it is not known which data a step of "
            f"this script uses: {cure}; or remove --skip-data"
        )
    if cure and not puts_back:
        step = at.handoff.resume_step
        said = (
            "It is not known which data this loop uses. Unless the data comes from something in the snapshots, such as a "
            "replay buffer of the Session or a random generator, no recovery can put it back"
        )
        if step >= 0:
            said = f"Step {step} was restored; it is not known which data this loop uses from here on"
        tell(at, f"{said}: {cure}")
    if (resumed := at.handoff.resume_step) >= 0:
        marks.due("The ranks started again", max(at.handoff.replay_until, resumed), resumed)
    if at.local_rank == 0:
        imported_modules.note(Path(at.handoff.modules), at.environment)


def tell(at: Attachment, sentence: str) -> None:
    """Print the sentence only on rank 0."""
    if at.rank == 0:
        say(sentence)
