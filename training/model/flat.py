"""How does a model become one flat vector, and a correction become part of the model?

Order: trainable parameters, then floating-point buffers (BatchNorm's statistics are averaged; integer buffers are left
alone, and so is one with infinities from the start, such as an attention mask, or one that torch would not save). Tied
parameters appear once. Buffers in one memory are all there, for a copy of the model may have them apart: only the
largest is written. Frozen parameters never travel: they take part in the signature only, so peers with another
frozen base are refused. Private ones (`exclude`) do neither. Names are names.py's.

Everything is float32 on the way. Parameters of lower precision keep what a correction could not yet move in a carry, or
small corrections would be rounded away for ever (carries.py); those with a float32 master (masters.py) are its
rounding (published.py says what is kept of both).
A tensor whose float32 rounding is what it should become is left alone, so a buffer that nobody changes stays the bits
that it is, in float64 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from peerd.training.model.apart import distinct, overlapping
from peerd.training.model.masters import EXACT, StateMasters, masters_of, strangers_of
from peerd.training.model.names import buffers_of, matching, parameters_of, ranges_of
from peerd.training.model.pieces import Piece, is_computable, is_plain, variances_in, variances_of
from peerd.training.model.private import Private
from peerd.training.model.published import PART_ON_CPU, PART_ON_GPU, Published, parts_of
from peerd.training.model.shards import is_sharded, shard_of
from peerd.training.model.signature import described, signature_of, type_name
from peerd.training.model.transfers import sent, wait_for
from peerd.training.model.variances import bounded

Flat = npt.NDArray[np.float32]

_NAMED_MAX = 3  # tensors in one line
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class FlatModel:
    """The flat view of one module, and its copy last published; of a sharded module, of this rank's shards.

    Modules and tensors may be replaced later on: what has the name, shape and type of a tensor is it. Other changes are
    told by `unshared`.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, exclude: Iterable[str] = ()) -> None:
        """`exclude` has names of private tensors, or patterns (fnmatch); `optimizer` shows whether there are masters.

        Raises ValueError for a model without trainable parameters, with complex ones or with two in one memory, for a
        pattern that fits nothing, and for masters that cannot be told apart. When it has shards that are frozen, all
        ranks have to call it at once.
        """
        parameters, buffers = parameters_of(model), buffers_of(model)
        private = matching(tuple(exclude), [*parameters, *buffers])
        _require_shapes(parameters)
        _require_values(parameters)
        shared = {name: p for name, p in parameters.items() if p.requires_grad and name not in private}
        if not shared:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train together")
        for name, parameter in shared.items():
            if not parameter.is_floating_point():
                raise ValueError(
                    f"parameter {name} is {type_name(parameter)}: only real floating-point ones can be averaged"
                )
        left_out = private | ranges_of(model)  # which begin infinite, and are not once there was a batch
        averaged = {name: b for name, b in buffers.items() if _is_averaged(b) and name not in left_out}
        written = distinct(averaged)
        if (twice := overlapping({**shared, **written})) is not None:
            raise ValueError(
                f"{twice[0]} and {twice[1]} are two tensors in one memory: make them one (b.weight = a.weight, not its "
                f".data), or clone() one of them"
            )
        self._masters = masters_of(shared, parameters, optimizer)
        self.pieces: list[Piece] = []
        self._shapes: dict[str, tuple[torch.Size, torch.Size]] = {}  # of the whole, and of what is in this process
        start = 0
        for name, tensor in [*shared.items(), *averaged.items()]:
            stop = start + shard_of(tensor).numel()
            is_buffer = name in averaged
            where = variances_in(name, averaged, written) if is_buffer else ()
            self.pieces.append(Piece(name, tensor, start, stop, is_buffer, where, self._masters.get(name)))
            self._shapes[name] = tensor.shape, shard_of(tensor).shape
            start = stop
        self.total = start
        self.parameters = sum(shard_of(p).numel() for p in shared.values())
        self.states = 0  # values at the end that are the optimizer's
        ours = {name: parameter for name, parameter in parameters.items() if name not in private}
        self.tensors = described(ours, averaged)
        self.signature = signature_of(self.tensors)
        self._model = model
        self._masters_kept = StateMasters(optimizer)
        self._known = parameters.keys() | buffers.keys()
        self._trained = shared.keys() | private
        self._changed: dict[str, set[str]] = {}  # the line that tells how, and whose names
        self._told: set[str] = set()
        self._elsewhere = 0 if self._masters else len(strangers_of(parameters, optimizer))
        self._views = averaged.keys() - written.keys()
        self.device = next(iter(shared.values())).device
        """Of the first trainable parameter, where whole vectors are."""
        self._trainable = len(shared)
        self._states: Callable[[], dict[str, torch.Tensor]] = dict
        self._published = Published(self.pieces, self.total, self.device)
        self.private = Private(optimizer, left_out, self.pieces, parameters, buffers)

    def share_states(self, states: Callable[[], dict[str, torch.Tensor]]) -> None:
        """Have the optimizer's state at the end of the vector, too: `states` gives its tensors as they are then."""
        self._states = states
        for name, tensor in states().items():
            stop = self.total + tensor.numel()
            self.pieces.append(Piece(name, tensor, self.total, stop, is_buffer=True))
            self._shapes[name] = tensor.shape, tensor.shape
            self.states += stop - self.total
            self.total = stop
        self.tensors += [f"{line.removesuffix('buffer')}state" for line in described({}, states())]
        self.signature = signature_of(self.tensors)
        self._published = Published(self.pieces, self.total, self.device)

    @property
    def variances(self) -> list[tuple[int, int]]:
        """Where in the flat vector running variances are, as start and stop; see variances.py."""
        return variances_of(self.pieces)

    def keep(self) -> None:
        """Make the model as it is now the base that `change` measures from: as it is published."""
        self.look_again()
        self._published.keep()
        self.private.keep()

    def kept(self, index: int) -> torch.Tensor:
        """That base of one piece, float32 values, shape (count,), where it lives."""
        return self._published.exact(index)

    def snapshot(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """`keep`; returns slices of the flat vector, with their float32 values, on the model's device or the host.

        They are made as they are asked for, from what only the next snapshot and corrections change.
        """
        self.keep()
        return self._published.parts()

    @torch.no_grad()
    def gather(self) -> torch.Tensor:
        """`snapshot` as one vector on the model's device, shape (total,)."""
        flat = torch.empty(self.total, dtype=torch.float32, device=self.device)
        for where, values in self.snapshot():
            flat[where].copy_(values)
        return flat

    @torch.no_grad()
    def change(self) -> torch.Tensor:
        """||x - base|| over the parameters: a 0-dimensional result on the device.

        Not finite when a parameter or a buffer is not, a private one, too: BatchNorm's statistics may be spoilt by a
        batch that left no gradient.
        """
        norm: torch.Tensor = torch.linalg.vector_norm(self.distances())
        return norm + self.nonfinite_rest()

    @torch.no_grad()
    def distances(self) -> torch.Tensor:
        """||x - base|| of each parameter in turn, on the device."""
        self.look_again()
        norms = []
        for piece, base in zip(self.pieces[: self._trainable], self._published.values, strict=False):
            value = piece.source.reshape(-1)
            if len(value) <= PART_ON_CPU:  # one operation for most tensors; an empty one has no part
                norms.append(torch.dist(value.float(), base.float()).to(self.device))
                continue
            parts = [torch.dist(value[where].float(), base[where].float()) for where in parts_of(base)]
            norms.append(torch.linalg.vector_norm(torch.stack(parts)).to(self.device))
        return torch.stack(norms)

    @torch.no_grad()
    def nonfinite_rest(self) -> torch.Tensor:
        """0 when all buffers, and what is private, are finite, else NaN."""
        # of all reductions the largest magnitude is the one that never overflows
        buffers = [piece.tensor for piece in self.pieces[self._trainable :] if piece.stop > piece.start]
        peaks = [*(torch.linalg.vector_norm(buffer, ord=math.inf) for buffer in buffers), *self.private.peaks()]
        zeros = [0 * peak.to(self.device, torch.float32) for peak in peaks]
        return torch.stack(zeros).sum() if zeros else torch.zeros((), dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def beyond_float32(self) -> str | None:
        """The first tensor with a finite value that float32 does not hold: such a model cannot be shared."""
        for piece in self.pieces:
            value = piece.source
            if value.dtype == torch.float64 and bool((value.isfinite() & ~value.float().isfinite()).any()):
                return piece.name
        return None

    def unshared(self) -> list[str]:
        """What of the model is not shared though it was changed to be, or still is: a line a way, each tensor once."""
        lines = []
        if self._elsewhere:
            lines.append(f"not shared: {self._elsewhere} of the tensors that the optimizer steps: the model lacks them")
            self._elsewhere = 0
        for what, names in self._changed.items():
            if new := sorted(names - self._told):
                more = f" and {len(new) - _NAMED_MAX} more" if len(new) > _NAMED_MAX else ""
                lines.append(what.format(", ".join(new[:_NAMED_MAX]) + more))
                self._told |= names
        return lines

    def add(self, correction: Flat) -> None:
        """x += correction, shape (total,). The base moves along, so that `change` stays the trainer's own.

        A running variance keeps a tenth of what it was, at least.
        """
        self.shift(torch.from_numpy(correction))

    @torch.no_grad()
    def shift(self, delta: torch.Tensor) -> None:
        """The same with a tensor."""
        self.look_again()
        for index, piece in enumerate(self.pieces):
            own = sent(delta[piece.start : piece.stop], piece.source.device)
            if piece.is_low_parameter:
                self._published.add(index, own)
                continue
            base = self._published.values[index]
            if piece.variances:
                base.copy_(_sum(base, own, piece.variances))
            else:
                base += own
            if piece.is_buffer:
                self._write(piece, _sum(self._published.now(piece), own, piece.variances))
            else:
                piece.source.add_(own.view(piece.source.shape).to(piece.source.dtype))
                if piece.master is not None:
                    piece.tensor.copy_(piece.source)
        wait_for(piece.source.device for piece in self.pieces)

    def load(self, values: Flat) -> None:
        """x = values, shape (total,)."""
        self.replace(torch.from_numpy(values))

    @torch.no_grad()
    def replace(self, values: torch.Tensor) -> None:
        """The same with a tensor."""
        self.look_again()
        for piece in self.pieces:
            self._write(piece, values[piece.start : piece.stop])
        wait_for(piece.source.device for piece in self.pieces)
        self._published.replace(values)

    @torch.no_grad()
    def restore(self) -> None:
        """x = base: go back to the last published copy, and what is private to what it was then."""
        self.look_again()
        self.private.restore()
        for piece, base in zip(self.pieces, self._published.values, strict=True):
            if piece.is_low_parameter:
                piece.source.copy_(base.view(piece.source.shape))
            else:
                self._write(piece, base)

    @torch.no_grad()
    def pass_on(self, act: Callable[[torch.Tensor], object], device: torch.device) -> None:
        """The model as it is now, with the carries, becomes what `act` makes of it in place; the base stays.

        `act` gets it in parts of whole tensors, float32, shape (count,), on `device`, one after the other.
        """
        self.look_again()
        for pieces in self._parts():
            start = pieces[0].start
            values = torch.empty(pieces[-1].stop - start, dtype=torch.float32, device=device)
            for piece in pieces:
                values[piece.start - start : piece.stop - start].copy_(self._published.now(piece))
            act(values)
            for piece in pieces:
                self._write(piece, values[piece.start - start : piece.stop - start])
            if device.type == "cpu":
                wait_for(piece.source.device for piece in pieces)

    def _parts(self) -> Iterator[list[Piece]]:
        part: list[Piece] = []
        for piece in self.pieces:
            if part and piece.stop - part[0].start > PART_ON_GPU:
                yield part
                part = []
            part.append(piece)
        yield part

    @torch.no_grad()
    def put_buffers(self, values: torch.Tensor) -> None:
        """The buffers of the model become their part of `values`, whatever stands elsewhere; not waited for.

        A later pass through the same graph, as a GAN makes, ends where it needs one as it was.
        """
        buffers = self.buffers
        unneeded = {id(tensor) for tensor in _unneeded(self._model)} if buffers else set()
        for piece in buffers:  # by way of `data` autograd does not count one as changed
            written = replace(piece, held=piece.held.data) if id(piece.held) in unneeded else piece
            self._write(written, values[piece.start : piece.stop])

    @property
    def buffers(self) -> list[Piece]:
        """As they are in the flat vector, in order, without the optimizer's state."""
        return [piece for piece in self.pieces[self._trainable :] if piece.stop <= self.total - self.states]

    def _write(self, piece: Piece, values: torch.Tensor) -> None:
        """The tensor becomes `values` (count,), but stays the bits that it is where these are the same float32.

        A view of another buffer becomes what that one does.
        """
        if piece.name in self._views:
            return
        source = piece.source
        if source.dtype not in EXACT:
            self._published.write(piece, sent(values, source.device))
            return
        wanted = sent(values.view(source.shape), source.device)
        if source.dtype == torch.float32 and not piece.is_buffer:
            source.copy_(wanted)
        else:
            source.copy_(torch.where(source.float() == wanted.float(), source, wanted.to(source.dtype)))
        if piece.master is not None:
            piece.tensor.copy_(source)

    @torch.no_grad()
    def loaded(self) -> None:
        """The model was loaded from elsewhere, a checkpoint: masters follow it, and nothing is carried."""
        self.look_again()
        self._published.drop_carries()
        for piece in self.pieces:
            if piece.master is not None:
                piece.source.copy_(piece.tensor)

    def look_again(self) -> None:
        """Follow what was replaced by its like, and see what cannot be followed."""
        parameters, buffers, states = parameters_of(self._model), buffers_of(self._model), self._states()
        before, lost = list(self.pieces), set()
        for index, piece in enumerate(before):
            found = (states if piece.name in states else buffers if piece.is_buffer else parameters).get(piece.name)
            shape, own_shape = self._shapes[piece.name]
            if found is piece.held and found.shape == shape:
                continue
            if found is None or (found.shape, found.dtype) != (shape, piece.held.dtype):
                lost.add(piece.name)
                if found is piece.held:  # other data in the same tensor: the last copy of what it was stands for it
                    kept = self._published.values[index].view(own_shape).to(found.dtype, copy=True)
                    self.pieces[index] = replace(piece, held=kept, master=None)
                    self._published.drop_carries(piece.name)
            elif is_sharded(found) == is_sharded(piece.held):  # else: whole for the forward pass it is in
                self.pieces[index] = replace(piece, held=found)
                self._published.drop_carries(piece.name)
        if any(piece.is_buffer and piece is not old for piece, old in zip(self.pieces, before, strict=True)):
            held = {piece.name: piece.held for piece in self.buffers}
            self._views = held.keys() - distinct(held).keys()
        self._follow_kept_masters()
        self._published.follow()
        self.private.follow(parameters, buffers)
        added = {name for name, tensor in (parameters | buffers).items() if tensor.is_floating_point()}
        frozen = {piece.name for piece in self.pieces if not piece.is_buffer and not piece.held.requires_grad}
        untrained = self._known - self._trained
        self._changed = {
            "not shared: {} left the model, or changed shape or type, after peerd.attach": lost,
            "not shared: {} came into the model after peerd.attach": added - self._known,
            "not shared: {} came into the optimizer after peerd.attach": states.keys() - {p.name for p in self.pieces},
            "not shared: {} can be trained only since peerd.attach (freeze them after it, and they are shared)": {
                name for name, one in parameters.items() if one.requires_grad and name in untrained
            },
            "still shared, though frozen after peerd.attach: {} (the swarm goes on changing them)": frozen - lost,
        }

    def _follow_kept_masters(self) -> None:
        low = [index for index in range(self._trainable) if self.pieces[index].held.dtype not in EXACT]
        self._masters_kept.seek(self.pieces[index].held for index in low)
        for index in low:
            piece = self.pieces[index]
            kept = self._masters_kept.of(piece.held)
            if kept is not piece.master and (kept is not None or piece.name not in self._masters):
                self.pieces[index] = replace(piece, master=kept)


def _sum(value: torch.Tensor, delta: torch.Tensor, variances: Iterable[tuple[int, int]]) -> torch.Tensor:
    """value + delta, both of shape (count,); of running variances a tenth of what they were, at least."""
    after = value + delta
    for where in variances:
        after[slice(*where)] = bounded(value[slice(*where)], after[slice(*where)])
    return after


def _unneeded(model: nn.Module) -> Iterator[torch.Tensor]:
    """What autograd is handed, and no backward pass needs: the statistics of BatchNorm in training."""
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS) and module.training:
            yield from module.buffers(recurse=False)


def _require_shapes(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet: run one batch through the model before peerd.attach")


def _is_averaged(buffer: torch.Tensor) -> bool:
    return is_computable(buffer) and bool(torch.isfinite(buffer).all())


def _require_values(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"parameter {name} has no values yet (it is on the meta device): load them before attach")
        if parameter.requires_grad and not is_plain(parameter):
            raise ValueError(f"parameter {name} is sparse, quantized or expanded: it cannot be corrected; clone() it")
