"""Hides the values of a command line that look like secrets, before it is shown on a page or sent to another program. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

HIDDEN = "***"
_NAME = r"[\w.+-]*(?:token|key|secret|password|passwd|passphrase|credentials?|on_incident)(?:[_.-][\w.-]*)?"
"""Matches the names of options, variables and keys whose values are secrets. A webhook's address (`on_incident`) counts as a secret.
`--tokenizer-type` and `--max-tokens` do not match."""
_WHOLE = re.compile(rf"(?is)(?:--?[\w-]+=)?{_NAME}=")
_OPTION = re.compile(rf"(?i)-{_NAME}")
_WITHIN = re.compile(rf"""(?i)(?<![\w.+-])({_NAME}["']?\s*[=:]\s*["']?|--{_NAME}\s+["']?)[^\s"'&,;}}]+""")
_LOGIN = re.compile(r"(://)[^/\s]+@")


def hidden(words: Iterable[str]) -> list[str]:
    """Return the words of a command line, with HIDDEN in place of secrets. Secrets are the values of options, variables and keys that
    `_NAME` matches, and the user names and passwords in addresses."""
    found: list[str] = []
    follows = False
    for word in words:
        if follows and not word.startswith("-"):
            word = HIDDEN
        elif whole := _WHOLE.match(word):
            word = f"{whole[0]}{HIDDEN}"
        found.append(_LOGIN.sub(rf"\1{HIDDEN}@", _WITHIN.sub(rf"\1{HIDDEN}", word)))
        follows = bool(_OPTION.fullmatch(word))
    return found


def hidden_line(line: str) -> str:
    """Return a line of a shell, with secrets hidden as in `hidden`."""
    words = shlex.split(line)
    safe = hidden(words)
    plain = {word: word.replace(HIDDEN, "") or "x" for word in safe} | {"&&": "x"}
    return line if safe == words else " ".join(w if shlex.quote(plain[w]) == plain[w] else shlex.quote(w) for w in safe)


def value(name: str, given: object) -> str:
    """Return the value of a key of the configuration, with secrets hidden as in `hidden`."""
    return hidden([f"{name}={given}"])[0].removeprefix(f"{name}=")
