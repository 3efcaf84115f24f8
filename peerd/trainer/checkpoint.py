"""How does a run survive a crash? Generations of model, optimizer and step, each one folder that appears at once.

    step-00000120/model.safetensors   model.* and optimizer.* tensors, and kept.* of what else the script keeps
    step-00000120/manifest.json       step, sizes, SHA-256 of the file and of itself, and the plain values of all

A generation is written to a temporary folder, every file and the folder are flushed to the disk, then it is renamed and
the parent flushed: after a crash at any point the newest folder is whole, or is not there. When a step is saved again
(the end of a run, after its last checkpoint) the earlier one moves to step-00000120.old first, and counts as long as
it is there. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from peerd.local.being_written import being_written, leftovers
from peerd.local.durable import flush, write
from peerd.local.generations import generations, step_of
from peerd.trainer import groups, states
from peerd.trainer.kept import NOTHING, Kept
from peerd.trainer.optimizers import kind, load, states_max
from peerd.training.model.shards import taken_apart, whole

KEEP_GENERATIONS = 2
MANIFEST_BYTES_MAX = 64 << 20  # it names every tensor, as an attach does
EXTRA_BYTES_MAX = 1 << 20  # of a module's extra state as JSON: a manifest over its limit would be read by nobody
HEADER_BYTES_MAX = 100_000_000  # as safetensors has it
ENTRY_BYTES = 56  # of a tensor there, beside its name, shape and offsets
VALUE_BYTES_MAX = 16
REST_BYTES = 1 << 10  # a manifest's step, signature and sums
LONGEST_KEY = "momentum_buffer"  # of torch's optimizers
EXTRA_STATE = "_extra_state"  # torch's name for what `get_extra_state` gives
_TENSORS = "model.safetensors"
_MANIFEST = "manifest.json"


class Damaged(Exception):
    """This generation is not what was written."""


class OfAnotherModel(Damaged):
    """The checkpoint is whole, as far as was looked, and of no use to this one."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A copy of everything a run needs to go on, taken between two steps."""

    step: int
    signature: str
    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, Any] | None  # plain values: class, param_groups, and the state that is no tensor
    extra: dict[str, Any] = field(default_factory=dict)  # of modules that have an extra state: plain values by name
    kept: dict[str, Any] = field(default_factory=dict)  # what kept.py tells, by the script's names


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    signature: str,
    left_out: Collection[str] = (),
    kept: Kept = NOTHING,
    *,
    stands: bool = False,
) -> Generation:
    """Copy model, optimizer and what is `kept` to host memory, but for the parameters `left_out`: the script's to make.

    Where nothing moves until the generation is saved (it `stands`), what is in host memory is not copied.
    """
    of_model, of_optimizer = _of_model(model, left_out), _state_of(optimizer)
    plain_kept, tensors_kept = kept.capture()
    taken: set[int] = set()
    tensors = {
        name: value if stands and _is_alone(value, taken) else _copy(value)
        for name, value in chain(_tensors(of_model, of_optimizer), tensors_kept.items())
    }
    extra = {name: value for name, value in of_model.items() if name not in tensors and _is_exact(value)}
    if of_optimizer is None:
        return Generation(step, signature, tensors, None, extra, plain_kept)
    plain = _plain_of(model, optimizer, of_optimizer)
    return Generation(step, signature, tensors, plain if _is_plain(plain) else None, extra, plain_kept)


def _plain_of(model: nn.Module, optimizer: torch.optim.Optimizer, of_optimizer: dict[str, Any]) -> dict[str, Any]:
    settings = [{**groups.plain(group), "params": group["params"]} for group in of_optimizer["param_groups"]]
    plain: dict[str, Any] = {
        "class": kind(optimizer), "param_groups": settings, "made": groups.made(optimizer), "state": {},
        "names": _names_of(model, optimizer),
    }  # fmt: skip
    for index, entries in of_optimizer["state"].items():
        plain["state"][str(index)] = {
            key: value for key, value in entries.items() if not isinstance(value, torch.Tensor)
        }
    return plain


def help_capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give this rank's shards to the one that captures."""
    for _, value in _tensors(_of_model(model, ()), _state_of(optimizer)):
        whole(value)


def not_kept(model: nn.Module) -> list[str]:
    """One line for each module whose extra state is neither a tensor nor plain data."""
    lines = []
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            value = module.get_extra_state()
            if not isinstance(value, torch.Tensor) and not _is_exact(value):
                key = f"{name}.{EXTRA_STATE}".removeprefix(".")
                lines.append(f"{key} is no plain data ({type(value).__name__}): checkpoints are written without it")
    return lines


def too_long(model: nn.Module, optimizer: torch.optim.Optimizer, kept: Kept = NOTHING) -> str:
    """A line if it may be that no checkpoint can be written, as its files would be too long with names; else "".

    No less is counted than torch's optimizers write, once each parameter has its state.
    """
    of_model, of_optimizer = _of_model(model, ()), _state_of(optimizer)
    plain_kept, tensors_kept = kept.capture()
    shapes = [(name, value.shape) for name, value in chain(_tensors(of_model, None), tensors_kept.items())]
    extra = {name: value for name, value in of_model.items() if _is_exact(value)}
    manifest = len(json.dumps([plain_kept, extra]))
    if of_optimizer is not None:
        shapes += _to_come(optimizer, of_optimizer["state"])
        plain = _plain_of(model, optimizer, of_optimizer)
        manifest += len(json.dumps(plain)) if _is_plain(plain) else 0
        manifest += sum(len(f'"{index}": {{}}, ') for index in range(len(plain["names"])))
    offsets = 2 * len(str(sum(VALUE_BYTES_MAX * shape.numel() for _, shape in shapes)))
    header = sum(len(json.dumps(name)) + len(str(list(shape))) + offsets + ENTRY_BYTES for name, shape in shapes)
    for what, found, most in ((_TENSORS, header, HEADER_BYTES_MAX), (_MANIFEST, manifest, MANIFEST_BYTES_MAX)):
        if found + REST_BYTES > most:
            return (
                f"checkpoints may fail: {what} would tell of up to {len(shapes):,} tensors, the optimizer's among them,"
                f" in {found / 1e6:.0f} MB, and {most / 1e6:.0f} is the most; join small parameters into larger ones"
            )
    return ""


def _to_come(optimizer: Any, state: dict[int, Any]) -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes of its state's tensors, once it has made all of them; no shorter than they are."""
    index = 0
    for part in getattr(optimizer, "parts", [optimizer]):
        for group in part.param_groups:
            for parameter in group.get("params", ()):
                held = [key for key, value in state.get(index, {}).items() if isinstance(value, torch.Tensor)]
                for key in [*held, *[LONGEST_KEY] * (states_max(part, group) - len(held))]:
                    yield f"optimizer.{index}.{key}", parameter.shape
                index += 1


def _of_model(model: nn.Module, left_out: Collection[str]) -> dict[str, Any]:
    """The entries of the model's state: without those `left_out`, and what a quantized one has beside it."""
    state: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    with_them = tuple(f"model.{name}." for name in left_out)
    return {
        name: value
        for name, value in state.items()
        if name.removeprefix("model.") not in left_out and not name.startswith(with_them)
    }


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Its state, when it has the form of torch's own, and can be told."""
    try:
        found = optimizer.state_dict()
    except Exception:  # torch's own fails where parameters were taken out of its groups
        return None
    state, groups = found.get("state"), found.get("param_groups")
    usual = isinstance(state, dict) and isinstance(groups, list) and all(isinstance(i, int) for i in state)
    return found if usual and all(isinstance(entries, dict) for entries in found["state"].values()) else None


def _tensors(of_model: dict[str, Any], of_optimizer: dict[str, Any] | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in of_model.items():
        if isinstance(value, torch.Tensor):
            yield name, value
    for index, entries in of_optimizer["state"].items() if of_optimizer is not None else ():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer.{index}.{key}", value


def restore(
    generation: Generation,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tell: Callable[[str], None] = lambda _: None,
    newer: Iterable[torch.Tensor] = (),
) -> bool:
    """Load a generation; returns whether the optimizer's state came along: that of another optimizer stays behind.

    `tell` gets the line on settings that are as the script has them now, not as the checkpoint does (groups.py), and
    that on parameters which the optimizer does not have now.
    A frozen parameter that it does not have stays as the script made it, and so do those of the model's tensors that
    are `newer`. Raises Damaged when the model's tensors do not fit.
    """
    weights = {name[6:]: value for name, value in generation.tensors.items() if name.startswith("model.")}
    there = model.state_dict()
    for name, held in there.items():
        if name in weights and isinstance(held, torch.Tensor) and weights[name].shape == held.shape:
            weights[name] = taken_apart(weights[name], held)
    weights |= {name[6:]: value for name, value in generation.extra.items()}
    if stay := set(map(id, newer)):
        held_here = states.tensors_held(model).items()
        weights |= {name: there[name] for name, held in held_here if id(held) in stay and name in there}
    may_lack = {name for name, held in model.named_parameters(remove_duplicate=False) if not held.requires_grad}
    _check_before(weights, there, model, may_lack)
    try:
        missing, unknown = states.load(model, weights, there)
    except Exception as error:  # of a class's own code, too
        why = next(iter(str(error).splitlines()), "")
        raise Damaged(f"does not fit this model: {why or type(error).__name__}") from None
    _check_names(missing, unknown, may_lack)
    plain = generation.optimizer
    if plain is None or plain["class"] != kind(optimizer):
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = plain.get("names", [])
    if (moved := _moved(names, _names_of(model, optimizer))) is None:
        return False

    def place_of(index: str) -> int | None:
        return moved.get(int(index)) if moved else int(index)

    state: dict[int, dict[str, Any]] = {}
    of_others = set()  # those that the script has not given the optimizer
    for index, entries in plain["state"].items():
        if (at := place_of(index)) is not None:
            state[at] = dict(entries)
        else:
            of_others.add(int(index))
    for name, value in generation.tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            if (at := place_of(index)) is None:
                continue
            value = value.clone()  # the optimizer takes it as it is, and with it the file, deleted since, on the disk
            held = parameters[at] if at < len(parameters) else value
            state.setdefault(at, {})[key] = taken_apart(value, held) if value.shape == held.shape else value
    kept, then = plain["param_groups"], plain.get("made", [])
    if moved:
        if (places := _places_now(kept, optimizer, moved)) is None:
            return False
        kept = [{**kept[at], "params": sorted(inside)} for at, inside in places]
        then = [then[at] if at < len(then) else {} for at, _ in places]
    together, line = groups.merged(kept, then, optimizer)
    try:
        load(optimizer, {"state": state, "param_groups": together})
    except ValueError:  # it groups the parameters in another way
        return False
    if line:
        tell(f"the optimizer has {line}")
    if of_others:
        first = names[min(of_others)] or "parameter outside of the model"
        more = f" (nor {len(of_others) - 1} more that the checkpoint has)" if len(of_others) > 1 else ""
        tell(
            f"the optimizer has no {first}{more} at peerd.attach: the checkpoint's state of that is left out (a group "
            "that is added before peerd.attach gets its state back)"
        )
    return True


def _names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The model's names of the optimizer's parameters, in its order; "" of one that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group.get("params", ())]


def _moved(before: list[str], now: list[str]) -> dict[int, int] | None:
    """From which place to which each parameter's state goes, if the script gives them in another order, or only some.

    So it is where it adds a group later (a layer that is unfrozen): as it attaches again there are fewer. {} where each
    stays in its place; None where one of them had no state, or nobody knows which: it would get another one's.
    """
    # of an optimizer that has masters of all parameters, or had, nobody knows more than the order
    if before == now or not any(before) or not any(now):
        return {}
    places = {key: place for place, key in enumerate(_told_apart(now))}
    had = list(_told_apart(before))
    if not places.keys() <= set(had) or now.count("") not in (0, before.count("")):
        return None
    return {place: places[key] for place, key in enumerate(had) if key in places}


def _told_apart(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """With how many before have it too: what is not the model's has no name, and only an order."""
    seen: Counter[str] = Counter()
    for name in names:
        yield name, seen[name]
        seen[name] += 1


def _places_now(
    kept: list[dict[str, Any]], optimizer: torch.optim.Optimizer, moved: dict[int, int]
) -> list[tuple[int, set[int]]] | None:
    """Of each group now, which one had its parameters, and where they are; None: they are grouped in another way."""
    before = _places(len(group["params"]) for group in kept)
    now = [set(places) for places in _places(len(group["params"]) for group in optimizer.param_groups)]
    had = [{moved[place] for place in places if place in moved} for places in before]
    if any(places not in had for places in now):
        return None
    return [(had.index(places), places) for places in now]


def _places(sizes: Iterable[int]) -> list[range]:
    """Of the parameters of groups so large, one after the other."""
    ends = list(accumulate(sizes))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _check_before(weights: dict[str, Any], there: dict[str, Any], model: nn.Module, may_lack: set[str]) -> None:
    """What `load_state_dict` only finds out when it has loaded what does fit: `there` is what it would go to.

    Raises Damaged. Modules that load in a way of their own take what they know, and are not judged before.
    """
    by_themselves = tuple(
        f"{path}." if path else "" for path, module in model.named_modules() if _loads_by_itself(module)
    )
    judged = [name for name in [*there, *weights] if not name.startswith(by_themselves)]
    _check_names(
        [name for name in judged if name not in weights], [name for name in judged if name not in there], may_lack
    )
    for name in judged:
        held, value = there.get(name), weights.get(name)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape != value.shape:
            shapes = f"{tuple(value.shape)} in the checkpoint, {tuple(held.shape)} in the model"
            raise Damaged(f"does not fit this model: {name} has shape {shapes}")


def _loads_by_itself(module: nn.Module) -> bool:
    """Whether it may take what does not fit its tensors; of torch's own, those for quantization do."""
    where, own = type(module).__module__, type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    as_usual = where.startswith("torch.") and not where.startswith("torch.ao.")
    return bool(module._load_state_dict_pre_hooks) or (own and not as_usual)


def _check_names(missing: Sequence[str], unknown: Sequence[str], may_lack: set[str]) -> None:
    frozen = tuple(f"{name}." for name in may_lack)
    lacks = [
        name
        for name in missing
        if name not in may_lack and not name.startswith(frozen) and name.rpartition(".")[2] != EXTRA_STATE
    ]
    if lacks or unknown:
        cause = f"it lacks {lacks[0]}" if lacks else f"it has {unknown[0]}, which the model has not"
        raise Damaged(f"does not fit this model: {cause}")


def save(folder: Path, generation: Generation) -> Path:
    """Write one generation; returns its folder. Raises OSError, and then leaves the older generations as they were."""
    final = folder / f"step-{generation.step:08d}"
    replaced = final.with_suffix(".old")
    with being_written(folder, generation.step) as temporary:
        tensors = temporary / _TENSORS
        try:
            save_file(generation.tensors, tensors)
        except SafetensorError as error:  # it wraps what the disk said
            raise OSError(str(error)) from None
        flush(tensors)
        manifest = _manifest(generation, tensors)
        if len(manifest) > MANIFEST_BYTES_MAX:  # nobody would read it, and it would push out one that can be read
            raise OSError(f"{_MANIFEST} has {len(manifest)} bytes, more than {MANIFEST_BYTES_MAX}")
        write(temporary / _MANIFEST, manifest)
        flush(temporary / _MANIFEST)
        flush(temporary)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        flush(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    # later steps are of a past that was refused, or of another model: they must not push out what is written now
    passed = [path for path in generations(folder) if step_of(path) <= generation.step]
    for old in passed[KEEP_GENERATIONS:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def put_later_aside(folder: Path, step: int, *, again: bool = False) -> Path | None:
    """Move what was written after `step`, from which training does not go on, in place of what was so moved before.

    `again`: that was in the same training, of which the furthest stay; a member that lies could have all deleted.
    Returns the folder that has it, or None: there is no such thing. Raises OSError.
    """
    later = [path for path in generations(folder) if step_of(path) > step]
    if not later:
        return None
    aside = folder.with_name(f"{folder.name}-passed")
    if not again:
        shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700, exist_ok=True)
    for path in later:
        shutil.rmtree(aside / path.name, ignore_errors=True)
        path.rename(aside / path.name)
    for nearer in generations(aside)[KEEP_GENERATIONS:]:
        shutil.rmtree(nearer, ignore_errors=True)
    for changed in (aside, folder, folder.parent):
        flush(changed)
    return aside


def newest(folder: Path, signature: str, warn: Callable[[str], None]) -> Generation | None:
    """The newest whole generation of this model; `warn` gets one line for each that is damaged, and one for all others.

    For the trainer, which writes in this folder: what a crash has left half written goes.
    """
    for leftover in leftovers(folder):
        shutil.rmtree(leftover, ignore_errors=True)
    return read_newest(folder, signature, warn)


def read_newest(folder: Path, signature: str, warn: Callable[[str], None]) -> Generation | None:
    """The same for one that only reads, while a trainer may write."""
    others = []
    found = None
    for path in (paths := generations(folder)):
        try:
            found = _load(path, signature)
            break
        except OfAnotherModel:
            others.append(path.name)
        except Damaged as error:
            then = "no older one is left" if path is paths[-1] else "trying the one before it"
            warn(f"checkpoint {path} refused: {error}; {then}")
    if others:
        which = others[0] if len(others) == 1 else f"{others[0]} and {len(others) - 1} more"
        goes = "they go once this one's have come to their steps, so move them if you want them"
        warn(f"checkpoints in {folder} that were written for another model are not read: {which}; {goes}")
    return found


def _load(path: Path, signature: str) -> Generation:
    tensors_path = path / _TENSORS
    try:
        if (path / _MANIFEST).stat().st_size > MANIFEST_BYTES_MAX:
            raise Damaged(f"{_MANIFEST} is over {MANIFEST_BYTES_MAX} bytes")
        try:
            manifest = json.loads((path / _MANIFEST).read_text())
        except ValueError as error:
            raise Damaged(f"{_MANIFEST} is not JSON: {error}") from None
        if manifest.pop("sha256") != _digest(manifest):
            raise Damaged(f"{_MANIFEST} does not match its own SHA-256")
        if manifest["signature"] != signature:
            raise OfAnotherModel("it was written for another model")
        entry = manifest["files"][_TENSORS]
        step, optimizer = int(manifest["step"]), manifest["optimizer"]
        extra, kept = dict(manifest.get("extra", {})), dict(manifest.get("kept", {}))
        size = tensors_path.stat().st_size
        if size != entry["bytes"]:
            raise Damaged(f"{_TENSORS} has {size} bytes, its manifest says {entry['bytes']}")
        if _sha256(tensors_path) != entry["sha256"]:
            raise Damaged(f"{_TENSORS} does not match the SHA-256 of its manifest")
        return Generation(step, signature, load_file(tensors_path), optimizer, extra, kept)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from None
        raise Damaged(f"{type(error).__name__}: {error}") from None


def _manifest(generation: Generation, tensors: Path) -> str:
    manifest = {
        "step": generation.step,
        "signature": generation.signature,
        "files": {_TENSORS: {"bytes": tensors.stat().st_size, "sha256": _sha256(tensors)}},
        "optimizer": generation.optimizer,
        "extra": generation.extra,
        "kept": generation.kept,
    }
    return json.dumps({**manifest, "sha256": _digest(manifest)})


def _digest(manifest: dict[str, Any]) -> str:
    """Of what JSON gives back, however it was spaced: a flipped bit in a learning rate is damage, too."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(manifest)), sort_keys=True).encode()).hexdigest()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return whole(tensor).to("cpu", copy=True).contiguous()


def _is_alone(tensor: torch.Tensor, taken: set[int]) -> bool:
    """Whether a file can be written of it as it is: all of a memory in the host of which no other has been `taken`."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    memory = tensor.untyped_storage()
    if memory.data_ptr() in taken or memory.nbytes() != tensor.nbytes or tensor.is_conj() or tensor.is_neg():
        return False
    taken.add(memory.data_ptr())
    return tensor.is_contiguous()


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_exact(value: Any) -> bool:
    """Whether JSON gives it back as it is: not a tuple, nor numbers as keys."""
    try:
        text = json.dumps(value, allow_nan=False)
        return len(text) <= EXTRA_BYTES_MAX and _same(json.loads(text), value)
    except (TypeError, ValueError, RecursionError):
        return False


def _same(a: Any, b: Any) -> bool:
    """As ==, but 1, 1.0 and True differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
