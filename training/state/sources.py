"""The training state and how it is restored: live tensors by name, and small values.

Restoring copies into the *live* tensors, because Megatron's parameters, gradient buffers and optimizer shards are views of each other. If a
tensor were replaced instead of filled, its views would silently keep the old values. Restoring also avoids the frameworks' load functions.
Megatron's had two bugs: a native Adam shared one `step` among all parameters, and weight-decay groups were swapped between pipeline stages.

A source is anything given to `Session(name=source)`: a module, or a list of them; an optimizer, plain or Megatron's; an object with
`state_dict` and `load_state_dict`; or anything else that can be filled in place (docs/state.md). A source inside a given object is saved as
a separate source.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import DataLoader

from ...resilience.errors import LayoutError, MachineError, SnapshotError, StateError
from ...resilience.inprocess.tally import RANDOMNESS
from .left_out import Declared, may_leave_out
from .modules.attribute_rules import declares
from .modules.attribute_sources import sources_within
from .modules.module_source import Modules
from .modules.module_tensors import named_modules
from .optimizers.nested_optimizers import inner_optimizers
from .optimizers.optimizers import Optimizers
from .partitioned import refuse_partitioned
from .tensors.finite_check import finite, sums
from .tensors.in_place import Nested
from .values.kind import is_source
from .values.packing import changes
from .values.session_parts import Parts
from .values.value_source import Attributes, Iterated, Known, Stateful, Values


class Source(Protocol):
    def collect(self) -> Nested:
        """Return live tensors and plain values, nested. The caller copies the tensors before the training changes them."""
        ...

    def restore(self, kept: Nested) -> None:
        """Restore what `collect` returned. The tensors in `kept` are new, and the source may keep them."""
        ...


@runtime_checkable
class Preparing(Source, Protocol):
    """A source whose tensors are filled in place. If a tensor from `collect` fits, `kept` contains that same tensor, already filled."""

    def prepare(self, described: Nested) -> None:
        """Allocate what a fresh start does not have yet, before any state changes. `described` has the structure that `restore` will get,
        with a `Piece` for each tensor. Raises LayoutError if the structure cannot fit."""
        ...


class Unfilled(LayoutError):
    """A source refused its state after other sources were restored. After this error, the process can't be used any more. The snapshot is
    kept."""

    def __init__(self, name: str, error: Exception) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        super().__init__(
            f"the state of {name!r} cannot be restored ({type(error).__name__}: {error}; {at.name}, {Path(at.filename).name} line "
            f"{at.lineno}). The rank takes no step from a partly restored state, and the snapshot is kept"
        )


def tensors_of(name: str, model: Modules) -> Iterable[torch.Tensor]:
    """Return a model's tensors before the first step. Raises StateError if a tensor can't be saved: a lazy module has none yet."""
    try:
        return model.tensors().values()
    except SnapshotError as error:
        raise StateError(f"{name}: {error}") from None


def collected(name: str, source: Source) -> Nested:
    """Return the source's state. Raises SnapshotError also if the script's `state_dict` fails: a training without mt_resilient would not
    call it."""
    try:
        return source.collect()
    except SnapshotError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise SnapshotError(
            f"{name} can't be saved: it does not give its state "
            f"({type(error).__name__}: {error}, {Path(at.filename).name} line {at.lineno})"
        ) from error


def put_back(sources: Mapping[str, Source], kept: Mapping[str, Any]) -> None:
    """Restore the sources from `kept`. Raises Unfilled if a source refuses its state. Errors about memory or files are raised unchanged, so
    that the caller can retry. Models come first, then objects that load their own state. Objects that load their own state may write into
    models, so the models are restored once more. The script's own values follow, because they may be views of other sources' memory. The
    rank's own state is last, because its gradients belong to tensors among these values."""
    there = {name: source for name, source in sorted(sources.items(), key=_turn) if name in kept}
    models = {name: source for name, source in there.items() if isinstance(source, Modules)}
    loading = {name: source for name, source in there.items() if isinstance(source, Declared)}
    _restore(models, kept)
    if any(source.writes for source in loading.values()):
        tensors = [each for model in models.values() for each in model.tensors().values()]
        # The device may have no memory for a second model.
        were = [(each, each.detach().to("cpu", copy=True), each.requires_grad) for each in tensors]
        parts = [each for model in models.values() for chunk in model.chunks for each in chunk.modules()]
        modes = [(each, each.training) for each in parts]
        _restore(loading, kept)
        for part, mode in modes:
            part.training = mode
        for tensor, copied, trained in were:
            tensor.data.copy_(copied)
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)
        _restore(models, kept)
    else:
        _restore(loading, kept)
    _restore({name: source for name, source in there.items() if name not in models and name not in loading}, kept)


def _restore(sources: Mapping[str, Source], kept: Mapping[str, Any]) -> None:
    for name, source in sources.items():
        try:
            source.restore(kept[name])
        except (MachineError, MemoryError, OSError, Unfilled):
            raise
        except Exception as error:  # raised by the script's own classes
            cause = error.__cause__ if isinstance(error, SnapshotError) else None
            raise Unfilled(name, cause if isinstance(cause, Exception) else error) from error


def _turn(named: tuple[str, Source]) -> int:
    name, source = named
    return 2 if name == RANDOMNESS else 1 if isinstance(source, Values) else 0


def sources_of(given: Mapping[str, Any], session: Any = None, look_through: bool = True) -> dict[str, Source]:
    """Return the sources of the objects given to a session, and of the objects inside them: `models={"g": G}` has the further source
    `models.g`. Given objects may contain the session itself. Raises TypeError as `source_of` does, and SnapshotError for an object that
    can't be saved."""
    known = Known()
    known.add("the session", session)
    things = {name: thing for name, thing in given.items() if thing is not None}
    found: dict[str, Source] = {}
    parts: set[int] = set()  # the ids of all modules of the sources

    def made(name: str, thing: Any) -> None:
        found[name] = source = source_of(name, thing, known)
        if isinstance(source, Modules | Optimizers):
            known.lenders.add(name, source.lent)
        if isinstance(source, Modules):
            known.lenders.modules[name] = source.by_path
            parts.update(id(each) for chunk in source.chunks for each in chunk.modules())

    for name, thing in things.items():
        made(name, thing)
    for name, source in found.items():
        if not isinstance(source, Values):
            known.add(name, things[name])

    def further(name: str, thing: Any) -> str:
        name = known.add(name, thing)
        made(name, thing)
        return name

    def there(*things: Any) -> bool:
        return any(id(each) in known.names or id(each) in parts for each in things)

    for name, source in _growing(found) if look_through else ():
        if isinstance(source, (Values, Stateful)):
            source.look_through(further)
            for path, thing in source.held() if isinstance(source, Stateful) else ():
                wraps = isinstance(thing, torch.optim.Optimizer) and hasattr(thing, "optimizer")
                around = (thing, thing.optimizer) if wraps else (thing,)
                known_already = there(*(thing.modules() if isinstance(thing, torch.nn.Module) else around))
                if not known_already and _may_be_apart(thing):
                    further(f"{name}.{path}", thing)
        elif isinstance(source, Modules):
            if any(isinstance(each, torch.jit.ScriptModule) for chunk in source.chunks for each in chunk.modules()):
                raise SnapshotError(
                    f"{name} holds a torch.jit.ScriptModule, whose attributes can't be saved. Train the module from which it was created, "
                    "directly or with torch.compile"
                )
            for path, thing in sources_within(named_modules(source.chunks), Parts(known.lenders)):
                if not there(thing):
                    further(f"{name}.{path}", thing)
    if look_through:
        refuse_partitioned(found)
    models = {name: source for name, source in found.items() if isinstance(source, Modules)}
    for source in found.values():
        if isinstance(source, Optimizers):
            source.parameters = [partial(model.known_as, name) for name, model in models.items()]
    return found


def _growing(found: Mapping[str, Source]) -> Iterator[tuple[str, Source]]:
    """Yield each source once, including sources that are added during the iteration."""
    seen: set[str] = set()
    while rest := [name for name in found if name not in seen]:
        for name in rest:
            seen.add(name)
            yield name, found[name]


def source_of(name: str, thing: Any, known: Known | None = None) -> Source:
    """Return the source that saves `thing`. Raises TypeError with its name if its class is not supported."""
    kind: Any = type(thing)
    known = known or Known()
    if isinstance(thing, torch.nn.Module):
        return Modules([thing], known.lenders, name)
    if isinstance(thing, (list, tuple)) and thing and all(isinstance(m, torch.nn.Module) for m in thing):
        return Modules(thing, known.lenders, name)
    if Source in kind.__mro__:  # a script's class may have methods with these names that mean something else
        return cast(Source, thing)
    if isinstance(thing, torch.optim.Optimizer) or inner_optimizers(thing):
        return Optimizers(thing, name, known.lenders)
    if kind.__name__ == "OptimizerParamScheduler":
        # Megatron's own load adds the saved steps to the steps that are counted already.
        return Attributes(thing)
    if is_source(kind):
        iterated = isinstance(thing, DataLoader) and hasattr(thing, "_get_iterator")
        return (Iterated if iterated else Declared if may_leave_out(thing) else Stateful)(name, thing, known)
    if isinstance(thing, MutableMapping) or changes(thing):
        return Values(name, thing, known)
    raise TypeError(f"Session({name}=…): {kind.__name__} is no module, no optimizer, no mapping and has no state_dict")


def _may_be_apart(thing: Any) -> bool:
    """Whether an object may be restored separately from the object that contains it. A sampler may not: it may count batches that its own
    load tells it to skip."""
    if not declares(thing):
        return True
    if hasattr(type(thing), "__iter__") or hasattr(type(thing), "__getitem__"):
        return False
    try:
        Stateful("", thing, Known()).collect()
    except Exception:  # an object that the script has not given to the Session may be skipped
        return False
    return True


def parameters_finite(sources: Mapping[str, Source], state: Mapping[str, Any], where: Collection[torch.device]) -> bool:
    """Return whether this rank's parameters on the devices `where` contain no NaN or Inf, which the gradient norm does not show. Megatron's
    norm does not cover copies of a parameter on other tensor-parallel ranks, so it misses a NaN in a copy (this happened with TP2). state:
    as collected, by source."""
    models = ((source, state[name]) for name, source in sources.items() if isinstance(source, Modules))
    tensors = (tensor for model, collected in models for tensor in model.judged(collected))
    with torch.no_grad():
        return finite(sums(tensor for tensor in tensors if tensor.device in where))


def shard_again(sources: Mapping[str, Source]) -> None:
    """Shard the parameters that FSDP2 has left gathered, after an evaluation for example. All ranks call this at the same point of their
    programs, because the next forward pass gathers the parameters again, collectively."""
    for source in sources.values():
        if isinstance(source, Modules):
            source.shard_again()
