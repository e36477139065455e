"""Fault models by name, and from a user's file. Figures that are not in the papers are called assumptions."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...resilience.config import typed
from ...resilience.errors import UsageError
from .faults import Model, Pattern, Shows, Source

_LLAMA3_NODE_DAYS = 21.23e6 / 8 / 24
"""Node-days of 54 days with 16,384 H100, in nodes of eight: 21.23 million GPU hours."""
_REPLACED = 0.78
"""Share of hardware faults for which the node has to be replaced: by Meta's count, a restart on the same node worked in some 22 %."""

_LLAMA3 = (
    ("GPU, NVLink", 148, Shows.DIES, _REPLACED),
    ("HBM", 72, Shows.DIES, _REPLACED),
    ("software", 54, Shows.DIES, 0.0),
    ("planned", 47, Shows.LOST, 1.0),
    ("GPU processor, SRAM", 36, Shows.DIES, _REPLACED),
    ("switch, cable", 35, Shows.HANGS, 0.0),
    ("host maintenance", 32, Shows.LOST, 1.0),
    ("other", 16, Shows.DIES, _REPLACED),
    ("NIC", 7, Shows.HANGS, _REPLACED),
    ("collective timeout", 7, Shows.HANGS, 0.0),
    ("silent corruption", 6, Shows.CORRUPTS, 0.0),
    ("thermal", 6, Shows.DIES, 1.0),
)
"""Name, count, how it shows, and the share for which the node has to be replaced. The counts are those of Llama 3 (arXiv:2407.21783, table
5; and the 47 planned ones of 466 interruptions). How faults show is an assumption, and so are the shares: a GPU fault ends the rank with an
error, and a network fault makes it hang. In this model, a planned interruption strikes without notice, as if the node were lost, which
costs more."""


def llama3() -> Model:
    """Return a model with 466 interruptions in 54 days of 16,384 GPUs; 419 of them were unexpected. Repair times are StepFun's."""
    return Model(name="llama3", sources=_llama3_sources(1.0))


def stepfun() -> Model:
    """Return a model with 4.2 faults per 1,000 node-days (Llama 3, without the planned ones: 3.8). A tenth of the nodes carries 41 % of
    them; 19 % of fault clusters have two or more faults. The shares of causes are Llama 3's (assumption)."""
    unexpected = sum(n for name, n, *_ in _LLAMA3 if name != "planned") / _LLAMA3_NODE_DAYS * 1000
    pattern = Pattern(lemons=0.10, lemon_share=0.41, clusters=0.19, cluster_most=19)
    sources = tuple(source for source in _llama3_sources(4.2 / unexpected) if source.name != "planned")
    return Model(name="stepfun", sources=sources, pattern=pattern)


def _llama3_sources(times: float) -> tuple[Source, ...]:
    return tuple(
        Source(name=name, shows=shows, per_1000_node_days=times * n / _LLAMA3_NODE_DAYS * 1000, lasting=lasting)
        for name, n, shows, lasting in _LLAMA3
    )


def failslow() -> Model:
    """Return a model in which 0.5 % of the hosts become slow within 54 days. Assumptions: a factor of 1.3, and a mean of four hours until
    an operator helps."""
    slow = Source(
        name="fail-slow", shows=Shows.SLOWS, per_1000_node_days=5 / 54, factor=1.3, lasts_s=4 * 3600.0, lasting=0.0
    )
    return Model(name="failslow", sources=(slow,))


def spikes() -> Model:
    """Return a model with twenty loss spikes in a run. All of them came again with the same data, and none without it (PaLM,
    arXiv:2204.02311, section 5.1). The length of PaLM's run, 54 days, is an assumption."""
    spike = Source(name="loss spike", shows=Shows.SPIKES, per_day=20 / 54, again=1.0)
    return Model(name="spikes", sources=(spike,))


def none() -> Model:
    """Return a model without faults."""
    return Model(name="none", sources=())


NAMED = {"llama3": llama3, "stepfun": stepfun, "failslow": failslow, "spikes": spikes, "none": none}


def named(words: str) -> Model:
    """Return the models in `words` (names or files, separated by commas) as one, with the pattern of the first. Raises UsageError."""
    parts = [_one(word.strip()) for word in words.split(",")]
    sources = [source for part in parts for source in part.sources]
    twice = {source.name for source in sources if [other.name for other in sources].count(source.name) > 1}
    if twice:
        raise UsageError(
            f"--faults {words} contains {', '.join(sorted(twice))} twice. Name each model once, and only one of llama3 and "
            "stepfun"
        )
    return Model(name="+".join(part.name for part in parts), sources=tuple(sources), pattern=parts[0].pattern)


def _one(word: str) -> Model:
    if word in NAMED:
        return NAMED[word]()
    if word.endswith(".toml"):
        return read(Path(word))
    near = difflib.get_close_matches(word, NAMED, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(NAMED)}, and files that end in .toml"
    raise UsageError(f"--faults {word}: there is no such model; {hint}")


def read(file: Path) -> Model:
    """Return the model in a user's file. Raises UsageError.

    [pattern]                       keys of `faults.Pattern`
    shape = 0.8
    [[source]]                      keys of `faults.Source`
    name = "GPU"
    shows = "dies"
    per_1000_node_days = 2.5
    """
    try:
        table = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the faults {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML: {error}") from error
    if unknown := set(table) - {"pattern", "source"}:
        raise UsageError(f"{file} has {', '.join(sorted(unknown))}; it may have [pattern] and [[source]]")
    sources, pattern = table.get("source", []), table.get("pattern", {})
    tables = isinstance(sources, list) and all(isinstance(values, dict) for values in (*sources, pattern))
    if not tables or not sources:
        raise UsageError(f"{file} needs at least one [[source]], and may have one [pattern]")
    return Model(
        name=file.stem,
        sources=tuple(_made(Source, values, f"{file}: source {n}") for n, values in enumerate(sources, 1)),
        pattern=_made(Pattern, pattern, f"{file}: pattern"),
    )


def _made(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """Return a Source or Pattern with the values from a file."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}"
            raise UsageError(f"{where}: there is no key {key!r}; {hint}")
    given = dict(values)
    if kind is Source:
        if missing := [key for key in ("name", "shows") if key not in given]:
            raise UsageError(f"{where} lacks {' and '.join(missing)}")
        if given["shows"] not in tuple(Shows):
            raise UsageError(f"{where}: shows is {given['shows']!r}; it may be {', '.join(Shows)}")
        given["shows"] = Shows(given["shows"])
    types = {"name": str, "shows": Shows, "cluster_most": int}
    for key, value in given.items():
        if key != "shows":
            given[key] = typed(types.get(key, float), value, f"{where}: {key}")
    return kind(**given)
