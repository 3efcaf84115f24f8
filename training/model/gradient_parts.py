"""Which part of a gradient is there while its backward pass is under way, and is that still what it was at the end?

A backward pass goes through a model from its end to its beginning, and so fills the flat vector: from some value on all
are there. Parameters that had no gradient in the last pass are not waited for. A gradient that changes after it was
copied (a hook of the script's, a pass within the pass) is seen by its version, as autograd counts it.

On CUDA copies wait for what makes the gradients on a stream of their own, and the pass goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from peerd.training.model.flat import FlatModel
from peerd.training.model.gradients import FlatGradients
from peerd.training.model.pieces import Piece
from peerd.training.model.transfers import fetch

BUCKET_VALUES = 12 << 20
"""That are told of together, 50 MB: where cores are scarce, messages for smaller ones cost more than they gain."""

STALE_MAX = 3
"""Passes that voided what was said of them: of none is anything said before its end then."""
FORGIVEN = 1 / 8
"""Of one, by each that did not."""


class GradientParts:
    """One gradient after the other, in `out`, shape (FlatGradients.total,), float32."""

    def __init__(self, flat: FlatModel, gradients: FlatGradients, out: torch.Tensor) -> None:
        self._flat = flat
        self._gradients = gradients
        self._out = out
        self._streams: dict[torch.device, Any] = {}
        self._used: set[int] | None = None  # parameters that had a gradient in the last pass, by their order
        self._stale_passes = 0.0
        self._begin_nothing()

    def _begin_nothing(self) -> None:
        self._pieces: list[Piece] = []
        self._places: dict[int, int] = {}  # of the parameters by id
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}  # the gradient that has come, and its version
        self._makers: dict[torch.device, set[Any]] = {}  # CUDA's streams in which gradients were made
        self._copied = self._low = 0  # from this parameter on all are copied, and all have come
        self._under_way: deque[tuple[int, list[Any]]] = deque()  # copies: from which value on, and CUDA's events
        self._has_told = False  # of some value that from it on all is there,
        self._is_stale = False  # and that is not so

    def begin(self) -> None:
        """A backward pass begins; what was said of one before is void."""
        self.wait()  # for the copies of one that raised, before its gradients are let go
        self._begin_nothing()
        self._pieces = self._gradients.parameters
        self._places = {id(piece.held): place for place, piece in enumerate(self._pieces)}
        self._copied = self._low = len(self._pieces)

    @property
    def is_first(self) -> bool:
        """Whether nothing was said of this pass that holds."""
        return not self._has_told or self._is_stale

    def came(self, parameter: torch.Tensor) -> int | None:
        """A parameter has its gradient of this pass: from which value on all are there, if that is worth saying."""
        place, gradient = self._places.get(id(parameter)), parameter.grad
        if place is None or gradient is None or gradient.layout != torch.strided or self._is_stale:
            return None
        if place in self._seen or place >= self._low:
            self._is_stale = True
            return None
        self._seen[place] = gradient, gradient._version
        if gradient.is_cuda:  # autograd is in the stream of this layer's forward pass, that of others may be another
            self._makers.setdefault(gradient.device, set()).add(torch.cuda.current_stream(gradient.device))
        if self._used is None:
            return None
        while self._low and (self._low - 1 in self._seen or self._low - 1 not in self._used):
            self._low -= 1
        if 0 < self._start(self._low) <= self._start(self._copied) - BUCKET_VALUES:
            self._under_way.append((self._start(self._low), self._copy(range(self._low, self._copied))))
            self._copied = self._low
        return self._arrived()

    def rest(self) -> Iterator[int]:
        """The pass is over: from which value on all are there, as copies that are under way arrive."""
        while self._under_way:
            for event in self._under_way[0][1]:
                event.synchronize()
            first = self._arrived()
            if first is not None and not self._is_stale:
                yield first

    def complete(self) -> bool:
        """Copy what is not there. Says whether nothing that was said before of this gradient holds.

        Raises ValueError: a gradient is sparse.
        """
        kept = range(self._copied, len(self._pieces))
        now = self._gradients.parameters
        stale = {place for place in kept if not self._is_as_copied(place, now)}
        self._is_stale |= bool(stale)
        self._gradients.gather(self._out, leave=frozenset(kept) - stale)
        is_first = self.is_first
        if self._has_told:
            self._stale_passes = self._stale_passes + 1 if is_first else max(0.0, self._stale_passes - FORGIVEN)
        used = {place for place, piece in enumerate(now) if piece.held.grad is not None}
        self._used = used if self._stale_passes < STALE_MAX else None
        self._begin_nothing()
        return is_first

    def wait(self) -> None:
        """Until no copy is under way."""
        for _, events in self._under_way:
            for event in events:
                event.synchronize()

    def _is_as_copied(self, place: int, now: list[Piece]) -> bool:
        if place >= len(now) or now[place].held is not self._pieces[place].held:
            return False
        gradient = now[place].held.grad
        if place not in self._seen:
            return gradient is None
        copied, version = self._seen[place]
        return gradient is copied and copied._version == version

    def _start(self, place: int) -> int:
        return self._pieces[place].start if place < len(self._pieces) else self._flat.parameters

    def _arrived(self) -> int | None:
        first = None
        while self._under_way and all(event.query() for event in self._under_way[0][1]):
            first, self._has_told = self._under_way.popleft()[0], True
        return first

    def _copy(self, places: range) -> list[Any]:
        """Begin it; what is not there has no gradient. Returns what it ends with."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for place in places:
            piece = self._pieces[place]
            part = self._out[piece.start : piece.stop]
            if place in self._seen:
                gradient = self._seen[place][0]
                by_device.setdefault(gradient.device, []).append((part.view(gradient.shape), gradient))
            else:
                part.zero_()
        return [event for device, pairs in by_device.items() for event in self._copy_on(device, pairs)]

    @torch.no_grad()
    def _copy_on(self, device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
        if device.type != "cuda":
            for part, gradient in pairs:
                part.copy_(gradient)
            return []
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        for maker in self._makers[device]:
            stream.wait_stream(maker)
        with torch.cuda.stream(stream):
            for part, gradient in pairs:
                fetch(gradient, part)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return [event]
