"""The table of examples/everyday: python -m tests.chaos.conformance [SCRIPT …]; what scripts/conformance runs.

A row for each script, a column for each fault, forked (warm) and cold: how it ended, as `ordeals.endure` says it, and what it cost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from .ordeals import EQUAL, OTHER, SCRIPTS, Fault, Script, endure, expected

WARM: dict[str, tuple[str, ...]] = {"warm": (), "cold": ("--no-warm",)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=" ".join(script.name for script in SCRIPTS))
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="leave run directories and output there")
    args = parser.parse_args()
    wanted = [script for script in SCRIPTS if not args.scripts or script.name in args.scripts]
    columns = [(fault, warm) for fault in Fault for warm in WARM]
    print("| script |", " | ".join(f"{fault.value}, {warm}" for fault, warm in columns), "|")
    print("|---" * (len(columns) + 1) + "|", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for script in wanted:
            place = (args.keep or Path(scratch)) / script.name
            place.mkdir(parents=True)
            if script.lacks:
                print(f"| {script.name} | left out: {script.lacks} is not installed |", flush=True)
                continue
            want = expected(script, place)
            cells = [cell(script, fault, place / f"{fault.name.lower()}-{warm}", want, warm) for fault, warm in columns]
            failed |= any(not good for _, good in cells)
            print(f"| {script.name} |", " | ".join(text for text, _ in cells), "|", flush=True)
    return failed


def cell(script: Script, fault: Fault, place: Path, want: str, warm: str) -> tuple[str, bool]:
    """What came of it; whether that is what is promised."""
    place.mkdir()
    began = time.monotonic()
    try:
        job, came = endure(script, [fault], place, want, *WARM[warm])
    except AssertionError as error:
        print(f"{script.name}, {fault.value}, {warm}: {error}", file=sys.stderr, flush=True)
        return "**did not end**", False
    otherwise = fault is Fault.NAN and script.nan != EQUAL
    good = came == (OTHER if otherwise else EQUAL)
    how = ", ".join(sorted({incident.launch for incident in job.incidents() if incident.launch}))
    print(
        f"{script.name}, {fault.value}, {warm}: {came}; {how}; {time.monotonic() - began:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    if not good:
        print(job.said()[-6000:], file=sys.stderr, flush=True)
        return f"**{came}**", False
    return script.nan if otherwise else f"{EQUAL} to its own resume" if script.resumes_at else EQUAL, True


if __name__ == "__main__":
    sys.exit(main())
