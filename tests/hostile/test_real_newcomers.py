"""What meets one who joins, or comes back: donors that are none, and what was said of it while it was away."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import victims as honest
from stranger import HUGE, Insider, Stranger
from victims import Victims

from peerd.node.donors import ASK_AGAIN_S, ASK_SOON_S, ASKS_MAX
from peerd.training.codecs import vector
from peerd.training.codecs.difference import digest_of_chunks
from peerd.transport.ids import Address
from peerd.transport.messages import Message, ModelPromise, ModelRequest, ModelSnapshot, Refuse

pytestmark = pytest.mark.soak
SILENT_S = ASK_SOON_S + (ASKS_MAX - 1) * ASK_AGAIN_S  # until a newcomer passes over a donor of which nothing comes


@pytest.mark.parametrize("how", ["refuse", "lie", "lie well", "say nothing"])
def test_donors_that_are_none(how: str, them: Victims) -> None:
    """Most of those who say that they have a model."""
    layout = them.layout()
    model = vector.encode("float32", layout, np.full(layout.total, 7.0, np.float32))[0]
    refuses = Refuse("model", "another", "yours") if how == "refuse" else None
    with them.unharmed(), ExitStack() as stack:
        donors = []
        addresses: dict[str, Address] = {}
        for number in range(4):
            donor = stack.enter_context(Insider(them.rows()[0], name=f"d{number}", refuses=refuses))
            donors.append(donor)
            donor.join(*them.addresses)

            def answer(sender: str, message: Message, donor: Insider = donor) -> None:
                if how.startswith("lie") and isinstance(message, ModelRequest) and sender in addresses:
                    host, port = addresses[sender]  # one that asks before it is known here asks again
                    donor.offer((host, port), ModelPromise(digest_of_chunks(model)))
                    for step in [them.nodes[0].step] if how == "lie well" else [1 << 63, HUGE, -1]:
                        donor.offer((host, port), ModelSnapshot(step, "float32", model))

            donor.misbehave = answer
        name = f"c{len(how)}"
        c = them.machine.start(name, them.script, join=them.nodes[0], SEED="5")
        c.eventually(lambda: c.socket.exists() and c.ask("info"))
        host, port = c.address.split(":")
        addresses[c.ask("info")["id"]] = host, int(port)
        assert honest.comes_true(lambda: c.step > 0, SILENT_S * len(donors) + 60.0)
        assert c.step < 1 << 30
        assert honest.loss(them.model(c)) < 2 * honest.LEARNED
        for donor in donors:
            donor.leave(*them.addresses)
        c.signal(signal.SIGINT)
        assert c.end() == 0
        for node in them.nodes:
            node.sees(**{name: "left"})


def test_one_that_was_spoken_for_while_it_was_away(them: Victims) -> None:
    a, b = them.nodes
    row = them.rows()[1]
    address = them.addresses[0]
    b.signal(signal.SIGKILL)
    b.end()
    with Stranger() as stranger:
        for epoch in (row.epoch + 1, row.epoch + 1000, 1 << 40, HUGE):
            stranger.tell(address, replace(row, epoch=epoch))
    b = them.machine.start("b", them.script, join=a, SEED="1")
    them.nodes[1] = b
    b.trains()
    for node in them.nodes:
        node.sees(a="alive", b="alive")
