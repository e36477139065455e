"""The signal at which a rank writes its stacks is the script's as soon as the script wants it."""

import subprocess
import sys
from pathlib import Path

TAKES_ALL_SIGNALS = """
import signal, sys
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.training.attach import stack_signal
page = Page(memoryview(bytearray(PAGE_BYTES)))
stack_signal.listen(page, sys.argv[1])
stack_signal.yield_to_script(page)
before, page.listens = page.listens, 1 << 62  # a stray write
stack_signal.yield_to_script(page)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, lambda *_: None)
stack_signal.yield_to_script(page)
print(before > 0, page.listens)
"""


def test_a_script_that_takes_the_signal_gets_no_more_of_them(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    said = subprocess.run(
        [sys.executable, "-c", TAKES_ALL_SIGNALS, str(tmp_path / "stacks")], capture_output=True, text=True
    )
    assert said.stdout.split() == ["True", "0"], said.stderr
