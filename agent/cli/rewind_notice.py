"""What the command `rewind` says before it acts: which snapshots it sets aside, which steps no snapshot holds, and how to come back."""

from __future__ import annotations

import sys
from collections.abc import Collection

from ...checkpoint.backend.paths import Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import catalog, commit, load
from ...resilience.errors import MachineError, UsageError
from ...resilience.model.request import Request, Wish
from ...resilience.model.types import Step
from ...resilience.plan import recoverable_state
from ...resilience.plan.resume_point import common_steps
from ...resilience.text import formatting
from ..run_directory import RunDirectory
from .explain import look
from .snapshots import choose


def request(directory: RunDirectory, where: str, skip: int) -> tuple[Request, Place | None]:
    """Print the notice, and return the order to go back to `where`, a step or a snapshot's name. Also return the snapshot with which, as
    the notice says, a later order can undo this one; None: the notice names none. Raises UsageError if there is no such snapshot, or it
    must not be used; SnapshotError if it is damaged."""
    world = look(directory) if directory.agent() else None
    root = directory.kept()
    try:
        seen = catalog.look(root) if world else None
    except MachineError as error:
        print(f"it is not known which snapshots this order sets aside: {error}", file=sys.stderr)
        seen = None
    if world is None or seen is None:
        if not where.isdecimal():
            raise UsageError(f"no agent is running in {directory.root}, or storage does not answer; nothing was done")
        return Request(kind=Wish.REWIND, step=Step(int(where)), skip=skip), None
    kept = common_steps(recoverable_state.said(world))
    step, left = target(where, seen, kept, directory)
    if left:
        load.open_ranks(left.under(root))
    back = None
    if left or step in kept:
        said, back = notice(step, left, seen, recoverable_state.step_reached(world), directory)
        for sentence in said:
            print(sentence, file=sys.stderr, flush=True)
    asked = Request(kind=Wish.REWIND, step=step, skip=skip, left=str(left) if left else "")
    return asked, back.under(root) if back else None


def target(
    where: str, seen: catalog.Catalog, kept: Collection[Step], directory: RunDirectory
) -> tuple[Step, Attempt | None]:
    """Return the step to go back to. Also return the snapshot of that step if an earlier order set this snapshot aside; else None. kept:
    steps that all nodes can restore. A step of the present lineage takes precedence."""
    if where.isdecimal():
        step = Step(int(where))
        of_step = [each for each in (*seen.left, *seen.rejected) if each.stamp.step == step]
        if step in kept or not of_step or any(each.stamp.step == step for each in seen.durable):
            return step, None
        found = choose(where, [each for each in of_step if each in seen.left] or of_step[:1], directory)
    else:
        found = choose(where, (*seen.durable, *seen.left, *seen.rejected), directory)
    if found in seen.rejected:
        why = commit.reason(found.under(directory.kept())).words
        raise UsageError(f"{found} is never used again: {why}. Nothing was done")
    return Step(found.stamp.step), found if found in seen.left else None


def notice(
    step: Step, left: Attempt | None, seen: catalog.Catalog, reached: Step, directory: RunDirectory
) -> tuple[list[str], Attempt | None]:
    """Return sentences about what an order to go back to `step` sets aside, and how to undo the order. Also return the snapshot with which
    a later order can undo this one. reached: newest step that any rank has finished."""
    root = directory.kept()

    def stays(each: Attempt) -> bool:
        if left is None:
            return each.stamp.step <= step
        lives, of = each.stamp[:2], left.stamp[:2]
        returned = lives < of and commit.returned(each.under(root))
        return lives <= of and each.stamp.step <= step and not returned

    aside = sorted((each for each in seen.durable if not stays(each)), key=lambda each: (each.stamp.step, each.stamp))
    said = ["this order sets aside no snapshot on disk"]
    if aside:
        steps = formatting.listed([each.stamp.step for each in aside])
        of = f"the snapshot of step {steps}" if len(aside) == 1 else f"the snapshots of steps {steps}"
        said = [
            f"this order sets aside {of}. To come back: mt-resilient rewind --to {aside[-1]} --run-dir {directory.root}"
        ]
    newest = max((each.stamp.step for each in aside), default=-1 if left else step)
    if reached > newest:
        since = f"newer than step {newest}" if newest >= 0 else "of it"
        said.append(
            f"the training is at step {reached}, and no snapshot {since} is on disk: those steps cannot be restored"
        )
    return said, aside[-1] if aside else None
