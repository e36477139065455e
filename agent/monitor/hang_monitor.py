"""Watches for silent ranks: applies `hang_rules` in every round, and reads the ranks' stacks when they are silent for too long.

    ranks' pages ──hearing──▶ Progress ──hang_rules.overdue──▶ two looks (Witness) ──hang_rules.compare──▶ RankStall, for the status

A look is one reading of a rank's stack and process state. The monitor kills no rank: it reports what it finds, and the controller decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...resilience.detect import hang_blame, hang_rules
from ...resilience.detect.hang_blame import Answer
from ...resilience.detect.hang_rules import HangPolicy, Look, Progress, Stage
from ...resilience.ipc.board_layout import Page
from ...resilience.model.signals import OWN_WORK, Place, RankStall
from ...resilience.model.types import RankPhase, Step
from ...resilience.text import sentences
from ..ranks.worker_group import WorkerGroup
from .rank_progress import Hearing
from .stack_sampler import Witness

PAUSE_S = 10.0
"""If the agent has not run for this many seconds, it discards its earlier looks: the ranks may have been suspended together with the
agent."""
ANSWER_S = 0.5
"""Seconds from the request for stacks until the agent reads them. faulthandler writes the stacks within milliseconds."""
LONGEST_CONFIRM_S, LONGEST_IN_TAIL_S = 60.0, 600.0
"""The most seconds between two repeated looks: while ranks train, and after their training loop. A script may run for hours after its
loop."""


class Lookout:
    def __init__(self, policy: HangPolicy, eyes: Witness, *, observe: bool = False) -> None:
        """observe: only report, and never act on a hang."""
        self._policy, self._eyes, self._observe = policy, eyes, observe
        self._hearing = Hearing(policy.warmup_steps)
        self._words: list[tuple[str, str]] = []
        self._silent_s: dict[str, float] = {}
        """For each place in the script: the longest silence of a rank that worked or waited there by itself, or whose device finished
        nothing. A silence counts once it has ended, or was taken for a hang."""
        self.stalls: tuple[RankStall, ...] = ()
        """For the status: one entry for each living rank, while all of them are silent for too long."""
        self.begin(tells=False)

    @property
    def warmup_s(self) -> float:
        """The longest silence before and during the first steps of this node's ranks (`Hearing.warmup_s`)."""
        return self._hearing.warmup_s

    def begin(self, tells: bool, warmup_s: float = 0.0) -> None:
        """Reset for new ranks. tells: whether the script is known to report its steps. warmup_s: see `Hearing.begin`."""
        self._hearing.begin(tells, warmup_s)
        self._alone_since_s: float | None = None
        self._rest(restarted=True)

    def _rest(self, restarted: bool = False) -> None:
        """Remember how long the ranks were silent at each place, and forget the looks. restarted: the silence, if there was one, did not
        end by itself, so only a limited part of it counts. If all of a hang's silence counted, each further hang at the same place would be
        found later."""
        for stall in self.stalls:
            if (stall.place in OWN_WORK or stall.device) and not stall.moved:
                most_s = max(self._policy.floor_s, self._policy.busy_s if stall.busy else self._policy.idle_s)
                silent_s = min(stall.silent_s, most_s) if restarted else stall.silent_s
                self._silent_s[stall.site] = max(silent_s, self._silent_s.get(stall.site, 0.0))
        self.stalls = ()
        self.teardown = ""
        """How ranks whose training loops are over hang in their teardown; empty: they do not."""
        self._told: set[Answer] = set()
        self._teardown_told = False
        self._looks: dict[int, Look] = {}
        self._unmoved_since_s: dict[int, float] = {}
        self._asked_s: float | None = None
        self._next_s = 0.0
        self._confirm_s = self._policy.confirm_s

    def words(self) -> Iterator[tuple[str, str]]:
        """Yield what is new since the last call: the event's name (`suspected`, or a mood) and a sentence for the log."""
        while self._words:
            yield self._words.pop(0)

    def _say(self, mood: str, sentence: str) -> None:
        self._words.append((mood, sentence))

    def look(self, group: WorkerGroup | None, pages: Sequence[Page], now_s: float, wall_s: float) -> None:
        """Check the ranks, once in each round of the agent's loop. now_s: monotonic."""
        living = [n for n in range(len(pages)) if group and not (n in group.ranks and group.ranks[n].ended_s)]
        ranks = self._hearing.listen(pages, living, now_s)
        if group is None or group.launcher.ended_s:
            return
        if self._hearing.gap_s > PAUSE_S:
            self._looks, self._asked_s = {}, None
        if not living:
            self._launcher_alone(pages)
        elif not hang_rules.overdue(list(ranks.values()), self._policy):
            if self._told:
                self._say("good", "the ranks give signs of life again: it was no hang")
            self._rest()
        elif self._asked_s is not None and self._hearing.awake_s - self._asked_s >= ANSWER_S:
            self._asked_s, self._next_s = None, self._hearing.awake_s + self._confirm_s
            seen = {n: self._eyes.take(n, pages[n], group.ranks.get(n, group.launcher), now_s) for n in ranks}
            self._compare(seen, ranks, pages, group.generation, wall_s)
        elif self._asked_s is None and self._hearing.awake_s >= self._next_s:
            if not self._told and not self._looks:
                self._say("suspected", f"{self._silence(ranks.values())}: looking at the stacks of all ranks")
            for n in ranks:
                self._eyes.ask(n, pages[n], group.ranks.get(n, group.launcher))
            self._asked_s = self._hearing.awake_s

    def _silence(self, ranks: Iterable[Progress]) -> str:
        longest = max(ranks, key=lambda rank: rank.silent_s)
        stage, budget_s = hang_rules.stage(longest, self._policy), hang_rules.budget_s(longest, self._policy)
        return f"no sign of life from any rank for {longest.silent_s:.0f} s ({stage}: {budget_s:.0f} s are allowed)"

    def _launcher_alone(self, pages: Sequence[Page]) -> None:
        """Check a launcher that still runs after its last rank has ended."""
        if self._alone_since_s is None:
            self._alone_since_s = self._hearing.awake_s
        silent_s = self._hearing.awake_s - self._alone_since_s
        over = all(page.phase in (RankPhase.FINISHED, RankPhase.STOPPED) for page in pages)
        if over and silent_s > self._policy.teardown_s:
            self._end_teardown(f"the launcher (torchrun) still runs {silent_s:.0f} s after its last rank has ended")

    # -- conclusions from two looks ---------------------------------------------------------------------------------------

    def _compare(
        self,
        seen: dict[int, Look],
        ranks: Mapping[int, Progress],
        pages: Sequence[Page],
        generation: int,
        wall_s: float,
    ) -> None:
        before, self._looks = self._looks, seen
        if before.keys() != seen.keys():
            self._unmoved_since_s = dict.fromkeys(seen, self._hearing.awake_s)
            return
        stalls = [self._stall(n, pages[n], ranks[n], before[n], wall_s) for n in seen]
        judgement, tail = hang_blame.judge(stalls), all(stall.stage == Stage.TAIL for stall in stalls)
        if tail or judgement.answer is not Answer.CERTAIN:
            self._confirm_s = min(2 * self._confirm_s, LONGEST_IN_TAIL_S if tail else LONGEST_CONFIRM_S)
        news = judgement.answer not in self._told
        self._told.add(judgement.answer)
        reached = min(page.step for page in pages)
        name = f"g{generation}-{f'step{reached}' if reached >= 0 else 'start'}"
        stacks = self._eyes.keep(name, seen) if news else self.stalls[0].stacks if self.stalls else ""
        if tail:
            self._judge_tail(stalls, judgement.answer, news, stacks)
            return
        if self._policy.act:
            works = any(
                s.moved or (s.busy and s.place in OWN_WORK) for s in stalls
            )  # then the flight recorders prove nothing
            self.stalls = tuple(replace(s, stacks=stacks, calls=() if works else s.calls) for s in stalls)
        if news and judgement.answer is Answer.SUSPECTED:
            self._say(
                "warn",
                f"slow, and not certain to hang: {judgement.reason}; the agent leaves it alone. "
                f"{sentences.no_hang((judgement.blamed or stalls)[0])}. Stacks: {stacks}",
            )
        elif news and not self._policy.act:
            self._say("bad", f"{judgement.reason}; hang.act is off, so the agent does nothing. Stacks: {stacks}")

    def _stall(self, local_rank: int, page: Page, rank: Progress, before: Look, wall_s: float) -> RankStall:
        look, awake_s = self._looks[local_rank], self._hearing.awake_s
        unmoved_s = awake_s - self._unmoved_since_s[local_rank]
        own_s = self._silent_s.get(look.spot.site, 0.0) if look.spot.place in OWN_WORK or look.device_waits else 0.0
        policy = hang_rules.patient(self._policy, own_s)
        moved, busy, why = hang_rules.compare(before, look, unmoved_s, policy)
        if moved:
            self._unmoved_since_s[local_rank] = awake_s
        return RankStall(
            rank=rank.rank,
            at_s=round(wall_s - rank.silent_s, 3),
            silent_s=round(rank.silent_s, 1),
            budget_s=round(hang_rules.budget_s(rank, self._policy), 1),
            stage=hang_rules.stage(rank, self._policy) or "",
            step=Step(page.step),
            place=Place.TEARDOWN if page.left else look.spot.place,
            words=look.spot.words,
            site=look.spot.site,
            moved=moved,
            busy=busy,
            why=why,
            started=page.stepped_ns > 0,
            device=hang_rules.device_state(before, look, policy),
            calls=look.calls,
        )

    def _judge_tail(self, stalls: Sequence[RankStall], answer: Answer, news: bool, stacks: str) -> None:
        """Judge ranks whose training loops are over. A script may do anything after its loop. So the agent ends the ranks only if all hang
        in the interpreter's teardown."""
        where = "; ".join(f"rank {s.rank} is {s.words}" for s in stalls)
        if answer is Answer.CERTAIN and all(s.place is Place.TEARDOWN for s in stalls):
            self._end_teardown(f"its ranks do not end ({where}; stacks: {stacks})")
        elif news:
            self._say(
                "warn",
                f"the loop is over, and the script takes long: {where}; the agent leaves it alone. Stacks: {stacks}",
            )

    def _end_teardown(self, what: str) -> None:
        if self._observe and not self._teardown_told:
            self._say("warn", f"the training is over, but {what}; without --observe, the agent would end all processes")
        self._teardown_told = True
        if self._policy.act and not self._observe and not self.teardown:
            self.teardown = what
            self._say(
                "warn",
                f"the training is over, but {what}: the agent ends all processes, and the job counts as finished",
            )
