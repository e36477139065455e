"""What a module sees that the warm process imports ahead, and which of its questions a forked rank has to ask by itself."""

import importlib
import signal
import sys
from pathlib import Path

import pytest

from mt_resilient.training.preload import _as_main
from mt_resilient.training.traces import Watch

QUESTIONS = {
    "import uuid\nRUN = uuid.uuid1()": "random numbers",
    "import threading\nTHREAD = threading.get_native_id()": "process id",
    "import time\nBEGAN = time.process_time()": "the time",
    "import os\nos.system('true')": "runs a program",
    "import os\nos.mkdir(__file__ + '.folder')": "changes a folder",
    "ROOT = __file__": "",
    "import os\nROOT = os.path.dirname(os.path.realpath(__file__))": "",
}


@pytest.mark.parametrize("source", QUESTIONS)
def test_what_each_rank_has_to_ask_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (tmp_path / "own_of_a_script.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    signal.setitimer(signal.ITIMER_REAL, 0)  # pytest's own limit
    watch = Watch(())
    try:
        with watch.running():
            importlib.import_module("own_of_a_script")
    finally:
        sys.modules.pop("own_of_a_script", None)
    found = watch.found()
    assert QUESTIONS[source] in found
    assert bool(found) is bool(QUESTIONS[source])


def test_modules_of_the_opening_find_the_script_as_their_main(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-m", "--steps"])
    main = sys.modules["__main__"]
    before = dict(vars(main))
    with _as_main("/home/train.py", {"__file__": "/home/train.py", "__package__": ""}) as namespace:
        exec("imported = 1", namespace)
        assert main.__file__ == sys.argv[0] == "/home/train.py"
        assert main.imported == 1  # type: ignore[attr-defined]
    assert vars(main) == before
    assert sys.argv == ["-m", "--steps"]
