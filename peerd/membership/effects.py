"""What membership asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from peerd.training.effects import Log
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Message


@dataclass(frozen=True, slots=True)
class SendDatagram:
    """Send one datagram; it may be lost, doubled or late."""

    address: Address
    message: Message


@dataclass(frozen=True, slots=True)
class PushPull:
    """Dial the address, exchange whole member tables, feed theirs back."""

    address: Address


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """The membership view of this member changed (it was added, or its state or meta differ)."""

    id: NodeId


@dataclass(frozen=True, slots=True)
class AskTwin:
    """Somebody says that this node's identity lives there: ask that address to prove it, which ends this one."""

    address: Address


MembershipEffect = SendDatagram | PushPull | MemberChanged | AskTwin | Log
