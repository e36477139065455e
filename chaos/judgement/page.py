"""The result of a campaign, as one page of text that needs no other document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...resilience.model.incident import PHASES
from ...resilience.text import formatting
from .checker import Finding, records
from .history import History
from .lines import stable

_CAUSED_S = 1.0
"""The clocks of the campaign and of the agent may differ by the agent's rounding and rest."""

_SOON_S = 5.0


def page(history: History, findings: Sequence[Finding], incidents: Sequence[Mapping[str, Any]], start_s: float) -> str:
    """Return the page. incidents: the last form of each, as the journal has them. start_s: wall-clock time of the job's first start."""
    lines = [
        *_runs(history),
        "",
        *_faults(history, incidents, start_s),
        "",
        *_promises(findings),
        "",
        _verdict(findings),
    ]
    return "\n".join(map(formatting.printable, lines))


def _runs(history: History) -> Iterator[str]:
    figures = stable(history.plain, history.clean).total()
    starts = len({record["number"] for record in records(history) if record["phase"] == "launch"})
    yield "The same command ran three times:"
    for name, run, of in (
        ("torchrun alone", history.plain, ""),
        ("mt-resilient, no fault", history.clean, f"{formatting.count(figures, 'equal line')} with a figure"),
        ("mt-resilient, faults", history.faults, formatting.count(starts, "start") + " of the ranks"),
    ):
        state = f"state {run.digest[:12]}… at step {run.step}" if run.digest else ""
        words = ", ".join(filter(None, (f"exit code {run.exit_code}", of, state)))
        yield f"  {name:<24}{formatting.seconds(run.seconds):>8}   {words}"


def _faults(history: History, incidents: Sequence[Mapping[str, Any]], start_s: float) -> Iterator[str]:
    yield f"{formatting.count(sum(bool(each.did) for each in history.struck), 'fault')} struck:"
    for at, struck in enumerate(history.struck):
        if not struck.did:
            yield f"  {struck.injection.fault}: not injected, {struck.why_not}"
            continue
        amid = f", amid the phase {struck.phase} of the recovery before" if struck.phase else ""
        yield f"  {struck.at_s:6.1f} s  step {max(0, struck.seen.step):<5} {struck.did}{amid}"
        answers = [each for each in incidents if _cause(history, each["at_s"] - start_s) == at]
        for incident in answers:
            yield f"{'':22}{_answer(incident)}"
        if not answers:
            later = [each.at_s - struck.at_s for each in history.struck[at + 1 :] if each.did]
            soon = ", or the next fault came first" if later and later[0] < _SOON_S else ""
            yield f"{'':22}{'the job continued from disk' if struck.needs_disk else 'no restart was needed'}{soon}"


def _cause(history: History, at_s: float) -> int:
    """Return the place of the newest fault before an incident."""
    return max((at for at, each in enumerate(history.struck) if each.did and each.at_s - _CAUSED_S <= at_s), default=-1)


def _answer(incident: Mapping[str, Any]) -> str:
    took = {name: incident["phases_s"][name] for name in PHASES if name in incident["phases_s"]}
    resumed = incident["resume_step"]
    lost = 0 if resumed is None else max(0, incident["step_at_fault"] - max(0, resumed))
    words = [f"found {incident['cause'].replace('_', ' ')}"]
    if resumed is not None:
        words.append("went back to " + ("the script's start" if resumed < 0 else f"step {resumed}"))
        words.append(f"{formatting.steps(lost)} computed again")
    if took:
        slowest = max(took, key=lambda name: took[name])
        longest = f", most of it in the phase {slowest}" if len(took) > 1 else ""
        words.append(f"{formatting.seconds(sum(took.values()))} in all{longest}")
    return "; ".join(words)


def _promises(findings: Sequence[Finding]) -> Iterator[str]:
    yield "Was every promise kept?"
    for finding in findings:
        mark = "NO " if finding.wrong else "?  " if finding.unknown else "yes"
        yield f"  {mark}  {finding.promise}"
        yield from (f"         {line}" for line in filter(None, (*finding.wrong, finding.unknown)))


def _verdict(findings: Sequence[Finding]) -> str:
    wrong = sum(bool(finding.wrong) for finding in findings)
    unknown = sum(bool(finding.unknown) for finding in findings if not finding.wrong)
    if wrong:
        return f"FAILED: {formatting.count(wrong, 'promise was', 'promises were')} not kept."
    return "PASSED." + (f" {formatting.count(unknown, 'promise')} could not be checked (marked ?)." if unknown else "")
