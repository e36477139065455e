"""`mt-resilient completion`, tried in real shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mt_resilient.cli import main

pytest.importorskip("shtab", reason="shtab is not installed (extra: completion)")
_ASK = """source "$1"; COMP_WORDS=("${@:2}"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$(complete -p mt-resilient | sed -E 's/.*-F ([^ ]+).*/\\1/'); printf '%s\\n' "${COMPREPLY[@]}" """


def script(shell: str, place: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    made = place / "script"
    made.write_text(capsys.readouterr().out)
    return made


def test_bash_completes_commands_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = script("bash", tmp_path, capsys)
    (tmp_path / "wanted").mkdir()

    def completed(*words: str) -> set[str]:
        command = ["bash", "-c", _ASK, "bash", str(made), "mt-resilient", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert completed("sn") == {"snapshot", "snapshots"}
    assert completed("snapshots", "ver") == {"verify"}
    assert completed("run", "--snapshot") == {"--snapshots", "--snapshot-every"}
    assert completed("status", "--run-dir", "wan") == {"wanted"}
    assert completed("completion", "") >= {"bash", "zsh", "fish"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = script(shell, tmp_path, capsys)
    assert "snapshots" in made.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (Debian)")
    done = subprocess.run([shell, "-n", str(made)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
