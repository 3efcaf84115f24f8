"""The life of a daemon's process, from its identity to the exit code: script, signals, control socket, end."""

from __future__ import annotations

import math
import os
import shlex
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio

from peerd.daemon import known_members
from peerd.daemon.control import ANY, Answer, LocalConnection, Verb, serve
from peerd.daemon.cures import ALONE, options_of
from peerd.daemon.node import SCRIPT_ENDS, Daemon, running
from peerd.daemon.supervisor import DAEMON, Supervisor
from peerd.daemon.trainer_session import TrainerPhase
from peerd.daemon.trainer_watch import STALL_MIN_S, TrainerWatch
from peerd.daemon.verbs import Verbs
from peerd.local import identity
from peerd.local.being_written import is_writing
from peerd.local.durable import put_aside, replace
from peerd.local.local_socket import NodeStarts, socket_path
from peerd.process.allocator import keep_freed_chunks
from peerd.process.logs import LOGGER, configure, written
from peerd.process.niceness import yield_to_others
from peerd.process.threads import in_thread
from peerd.security.wall_clock import shown as shown_time
from peerd.settings import Settings, is_loopback, unknown_variables
from peerd.training.kernels.cores import spread, to_spare
from peerd.training.modes import alike_at_start
from peerd.training.tasks import TASKS
from peerd.transport.errors import UserError
from peerd.transport.ids import Address, NodeId, shown
from peerd.transport.messages import Member

SCRIPT_ENDS_S = 15.0  # for a script that was told to end: ranks part, and torchrun looks after them now and then
SCRIPT_MIN_S = 0.5  # for one that does not know of us
LOOK_AT_CHECKPOINT_S = 0.25
AWAITED_LONG_S = 2.0  # then whoever waits is told
LOOK_AT_TRAINER_S = 1.0
TWICE_S = 0.5
RANK = "THEIR_RANK"  # as others are told to join

Attach = Callable[[LocalConnection, dict[str, Any]], Awaitable[None]]


async def run(settings: Settings, mine: identity.Identity, command: list[str], fresh: bool = False) -> int:
    """The life of a daemon; returns the exit code. A `fresh` one has no past but who it is.

    Raises UserError for what the user can mend.
    """
    try:
        with spread(to_spare(), yield_to_others), _anew(settings) as begin:
            return await _run(settings, mine, command, begin if fresh else None)
    finally:
        written()


class _Desk:
    """The control socket, from before there is a node to ask: that may wait long, and is not to be started twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waits_for = ""
        self._verbs: dict[str, Verb] = {ANY: self._starts}
        self._attach: Attach | None = None

    async def open(self, nursery: trio.Nursery) -> None:
        """Raises UserError: a node of this name runs here."""
        await nursery.start(serve, self._path, self._verbs, self._attached)

    def waits(self, what: str) -> None:
        """For what the node waits now; "": it is about to be there."""
        self._waits_for = what

    def give_to(self, verbs: dict[str, Verb], attach: Attach) -> None:
        """The node is there."""
        del self._verbs[ANY]
        self._verbs.update(verbs)
        self._attach = attach

    async def _attached(self, connection: LocalConnection, message: dict[str, Any]) -> None:
        if self._attach is None:
            await connection.send({"error": self._answer()})
        else:
            await self._attach(connection, message)

    async def _starts(self, _: dict[str, Any]) -> Answer:
        raise NodeStarts(self._answer())

    def _answer(self) -> str:
        name = self._path.stem
        if not self._waits_for:
            return f"the node {name!r} is starting: ask again in a moment"
        return f"the node {name!r} is starting: it waits for {self._waits_for}; its log says more, and Ctrl-C ends it"


@contextmanager
def _anew(settings: Settings) -> Iterator[Callable[[], None]]:
    """Yields what puts the past aside. It is back where the start is refused, and nothing of another is there."""
    aside: Path | None = None
    known: dict[Path, str] = {}

    def begin() -> None:
        nonlocal aside
        known.update(known_members.texts(settings))
        if (aside := put_aside(settings.checkpoints)) is not None:
            LOGGER.info("beginning anew; the checkpoints of before are in %s", aside)
        known_members.forget(settings)

    try:
        yield begin
    except BaseException:
        has_begun = os.path.lexists(settings.checkpoints) or known_members.texts(settings)
        if (aside or known) and not has_begun:
            with suppress(OSError):  # the refusal counts
                if aside is not None:
                    aside.rename(settings.checkpoints)
                for path, text in known.items():
                    replace(path, text)
                LOGGER.info("nothing has begun anew: what was put aside is back")
        raise


async def _run(settings: Settings, mine: identity.Identity, command: list[str], anew: Callable[[], None] | None) -> int:
    configure(settings.name, settings.run, settings.log)
    keep_freed_chunks()
    if (ignored := unknown_variables(os.environ)) is not None:
        LOGGER.warning("%s", ignored)
    kept = () if anew else known_members.read(settings)
    begin = anew or (lambda: None)
    path = socket_path(settings.name)
    told = {"PEERD_SOCKET": str(path), "PEERD_NAME": settings.name, DAEMON: str(os.getpid())}
    supervisor = Supervisor(command, told) if command else None
    desk = _Desk(path)
    async with running(
        settings, mine, expects=bool(command), kept=kept, begin=begin, early=desk.open, waits=desk.waits
    ) as (daemon, address):
        start_soon = daemon.nursery.start_soon
        await daemon.nursery.start(_watch_signals, daemon, supervisor, path)  # first: the script may send one
        verbs = {**Verbs(daemon).table(), "refused": _refusal_hook(supervisor)}
        desk.give_to(verbs, _attach_hook(daemon, supervisor))
        issues = daemon.entry is not None and daemon.entry.issuer is not None
        _announce(settings, address, (daemon.me.host, daemon.me.port), command, issues=issues)
        if supervisor is None:
            LOGGER.info(
                "no script was given: one that you start on this machine trains with this node "
                "(PEERD_NAME=%s python train.py)",
                shlex.quote(settings.name),
            )
        if daemon.entry is not None:
            ends = shown_time(daemon.entry.trust.certificate.not_valid_after_utc)
            by = "connections are encrypted; this node is a member by %s; its certificate ends %s"
            LOGGER.info(by, daemon.entry.by, ends)
        left = known_members.take_left(settings)
        if not (settings.seeds or kept):
            _tell_where_it_was(daemon, left)
        if supervisor is not None:
            daemon.crash = lambda: supervisor.crash if _script_is_gone(daemon) else ""
            start_soon(_supervise, daemon, supervisor)
        start_soon(_watch_failure, daemon)
        start_soon(_watch_trainer, daemon)
        start_soon(_keep_known_members, daemon, kept)
        await daemon.leaving.wait()
        await _end(daemon, supervisor)
    if daemon.model.fatal is not None:
        raise UserError(daemon.model.fatal)
    return 0


def _tell_where_it_was(daemon: Daemon, left: tuple[Address, ...]) -> None:
    """To a node that begins alone, though it was in a swarm."""
    if left:
        text = "this node left a swarm that had a member at %s, and begins another, alone; to be in that one, "
        LOGGER.warning(text + "stop it and start it with --join %s", *2 * [shown(left[0])])
    elif daemon.entry is not None and daemon.entry.folder is None:  # its swarm began elsewhere
        alone = "this node was let into a swarm and knows no address there: it begins alone. peerd leave and "
        LOGGER.warning("%sCtrl-C forget the members; start it again with --join HOST:PORT of one", alone)


async def _end(daemon: Daemon, supervisor: Supervisor | None) -> None:
    """Leave the swarm in good order, and see the script to its end."""
    if supervisor is not None:
        supervisor.stopping = True  # no further start while it hands over
    was_in_it = daemon.model.fatal is None or daemon.model.meta.ready  # who was refused never was
    if was_in_it:
        LOGGER.info("leaving the swarm")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_say_what_is_awaited, daemon)
        if _trainer_waits(daemon):
            if supervisor is not None:
                await supervisor.stop(0)
            elif daemon.model.fatal is not None:
                await daemon.model.tell_failed(daemon.model.fatal)
        daemon.ending = "the hand-over of what was not yet sent"
        await daemon.leave()
        daemon.ending = SCRIPT_ENDS
        if supervisor is not None:
            await supervisor.stop(SCRIPT_ENDS_S if supervisor.attached else SCRIPT_MIN_S, _watch_of_checkpoint(daemon))
        nursery.cancel_scope.cancel()
    if was_in_it:
        LOGGER.info("left the swarm")


async def _say_what_is_awaited(daemon: Daemon) -> None:
    """Once for each, where it takes long."""
    said = ""
    while True:
        await trio.sleep(AWAITED_LONG_S)
        if daemon.ending != said:
            said = daemon.ending
            LOGGER.info("waiting for %s; Ctrl-C or SIGTERM now ends this node without it", said)


def _watch_of_checkpoint(daemon: Daemon) -> Callable[[], Awaitable[bool]]:
    """Asked again and again, tells whether the script writes one."""
    looked_at, writing = -math.inf, False

    async def writes() -> bool:
        nonlocal looked_at, writing
        status, now = daemon.model.status, trio.current_time()
        if status is None or now - looked_at < LOOK_AT_CHECKPOINT_S:
            return writing
        looked_at = now  # in a thread: a file system may hang
        writing = await in_thread(partial(is_writing, daemon.settings.checkpoints, status.pid), abandon_on_cancel=True)
        daemon.ending = "the script's last checkpoint" if writing else SCRIPT_ENDS
        return writing

    return writes


def _script_is_gone(daemon: Daemon) -> bool:
    """Or has been started again, and has yet to train."""
    return daemon.model.status is None or daemon.model.status.phase in (TrainerPhase.STARTING, TrainerPhase.GONE)


def _trainer_waits(daemon: Daemon) -> bool:
    """Whether the trainer has made no step yet: it has nothing to give, and nothing to write down."""
    status = daemon.model.status
    return daemon.model.fatal is not None if status is None else status.phase is TrainerPhase.STARTING


# -------------------------------------------------------------------------------------------------------- the script


def _attach_hook(daemon: Daemon, supervisor: Supervisor | None) -> Attach:
    async def attach(connection: LocalConnection, message: dict[str, Any]) -> None:
        if supervisor is not None and supervisor.runs and message.get("daemon") != str(os.getpid()):
            own = f"this node has a script of its own, {supervisor.name}, and this one is not of its processes"
            await connection.send({"error": f"{own}: {ALONE}; a container has to be given {DAEMON} as it is there"})
            return
        if supervisor is None:
            await daemon.model.attach(connection, message)
            return
        supervisor.note_attach()
        await daemon.model.attach(connection, message, lambda: supervisor.runs, supervisor.note_unfit)

    return attach


def _refusal_hook(supervisor: Supervisor | None) -> Verb:
    """The script came to peerd.attach, which did not take what it gave, and has said so."""

    async def refused(message: dict[str, Any]) -> dict[str, Any]:
        if supervisor is not None and message.get("daemon") == str(os.getpid()):  # not of one that is run by hand
            supervisor.note_refused()
        return {}

    return refused


async def _supervise(daemon: Daemon, supervisor: Supervisor) -> None:
    try:
        await supervisor.run(lambda: daemon.model.status)
        supervisor.runs = False
        if not supervisor.attached and not supervisor.stopping:
            LOGGER.warning("%s ended without calling peerd.attach: this node trains nothing", supervisor.name)
        if not supervisor.stopping:
            await daemon.model.expect_none()
    except UserError as error:
        daemon.fail(str(error))


async def _watch_trainer(daemon: Daemon) -> None:
    """Say, here and to the others, when the trainer makes no step for long; to the others, how far it is."""
    watch: TrainerWatch | None = None
    told = False
    while True:
        slept_at = trio.current_time()
        await trio.sleep(LOOK_AT_TRAINER_S)
        slept_s = trio.current_time() - slept_at
        if watch is not None and slept_s > STALL_MIN_S:
            watch.goes_on(trio.current_time())
        if (status := daemon.model.status) is None or slept_s > 2 * LOOK_AT_TRAINER_S:  # it may have stood still, too
            continue
        if watch is None or watch.status is not status:
            watch = TrainerWatch(status)
        watch.look(trio.current_time())
        await daemon.model.tell_made()
        if watch.stalled == told:
            continue
        told = watch.stalled
        if told and status.phase is TrainerPhase.TRAINING:
            silent_s = trio.current_time() - (status.last_step_at or 0.0)
            text = "the trainer (pid %d) made its last step %.0f s ago, and its slowest took %.1f s: does it hang?"
            LOGGER.warning(text, status.pid, silent_s, watch.slowest_s)
        elif status.phase is TrainerPhase.TRAINING:
            LOGGER.info("the trainer steps again")
        await daemon.model.tell_stalled(told)


# ----------------------------------------------------------------------------------------------------------- the end


async def _watch_failure(daemon: Daemon) -> None:
    await daemon.model.failed.wait()
    daemon.leaving.set()


async def _keep_known_members(daemon: Daemon, kept: tuple[Address, ...]) -> None:
    """Until it leaves: a node that left on purpose starts from its flags, one that was killed looks for its swarm."""
    me = daemon.me.id

    def met() -> dict[NodeId, Member]:
        """A member that lies may name as many others as it likes."""
        return daemon.acquaintances.of(daemon.members())

    try:
        await known_members.keep(daemon.settings, me, met, kept, daemon.leaving)
    finally:
        never_in_it = not kept and not daemon.model.meta.ready
        if daemon.leaving.is_set() and (daemon.model.fatal is None or never_in_it):
            others = known_members.known(met(), me, ())
            known_members.forget(daemon.settings, others if daemon.model.fatal is None else ())


async def _watch_signals(
    daemon: Daemon, supervisor: Supervisor | None, path: Path, task_status: trio.TaskStatus[None]
) -> None:
    """The first SIGINT or SIGTERM leaves in good order; the second ends at once, with the script and the socket.

    So does the first SIGHUP, unless whoever started this (nohup) ignores it; a terminal that ends often sends two. What
    follows within TWICE_S is the first again: timeout(1) signals its child, and then the group that it is in.
    """
    wanted = [signal.SIGINT, signal.SIGTERM]
    wanted += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    with trio.open_signal_receiver(*wanted) as signals:
        task_status.started()
        first_at = -math.inf
        async for number in signals:
            if trio.current_time() - first_at < TWICE_S:
                continue
            first_at = trio.current_time()
            if daemon.leaving.is_set() and number != signal.SIGHUP:
                LOGGER.warning("ended at once by %s, without %s", signal.Signals(number).name, daemon.ending)
                if supervisor is not None:
                    supervisor.kill()
                path.unlink(missing_ok=True)
                written()
                os._exit(128 + number)
            daemon.leaving.set()


# ----------------------------------------------------------------------------------------------------------- the log


def _of_another(command: list[str]) -> list[str]:
    """The command for another node: with this one's --rank, or a task's default, it would draw the same batches."""
    words = [
        RANK if before == "--rank" else f"--rank={RANK}" if word.startswith("--rank=") else word
        for before, word in pairwise(["", *command])
    ]
    if command and command[0] in TASKS:
        said = {word.partition("=")[0] for word in command}
        for option, value in (("--rank", RANK), ("--peers", os.environ.get("PEERD_PEERS", "HOW_MANY"))):
            words += [] if option in said else [option, value]
    return words


def _announce(settings: Settings, bound: Address, reached: Address, command: list[str], *, issues: bool) -> None:
    where, local = shown(reached), is_loopback(bound[0]) and is_loopback(reached[0])
    elsewhere = settings.advertise or settings.relay
    here = f"{shown(bound)}, which others reach at {where}" if elsewhere else shown(bound)
    if settings.seeds:  # whoever joined through this node before it is a member would wait with it, or found a swarm
        LOGGER.info("listening on %s; joining through %s", here, ", ".join(map(shown, settings.seeds)))
    else:
        options = ["--join", where] if local or settings.insecure_plaintext else ["--token", "TOKEN"]
        options += ["--name", "THEIRS", "--bind", shown((reached[0], 0))] if local else ["--bind", "THEIR_ADDRESS"]
        # whoever comes without them is refused
        alike, by_default = (alike_at_start(told.mode, told) for told in (settings, Settings()))
        options += [] if alike == by_default else shlex.split(options_of(alike) or "")
        options += ["--insecure-plaintext"] if settings.insecure_plaintext else []
        options += ["--swarm", settings.swarm] if settings.swarm != Settings().swarm else []
        options += ["--transport", settings.transport] if settings.transport != Settings().transport else []
        options += ["--rdma-allow-fallback"] if settings.rdma_allow_fallback else []
        theirs = _of_another(command)
        words = [*theirs, *options] if len(theirs) <= 1 else [*options, "--", *theirs]
        run = f"PEERD_RUN={settings.run} " if settings.run else ""
        on = "" if issues else " on the swarm's first node"  # one that was let in, and that asks nobody now
        cure = "" if "TOKEN" not in options else f"; peerd token{on} prints the TOKEN"
        LOGGER.info("listening on %s; others join with: %speerd start %s%s", here, run, shlex.join(words), cure)
    if settings.insecure_plaintext and not local:
        LOGGER.warning("connections are neither encrypted nor authenticated: use a network that you trust")
