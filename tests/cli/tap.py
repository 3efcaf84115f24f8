"""A tap on the loopback device: every packet to or from one address, as whoever has a hand on the line sees it."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections import defaultdict
from types import TracebackType

PACKET_MAX = 1 << 17  # a loopback device hands on up to 64 KiB at once
BUFFER_BYTES = 64 << 20
_ETH_P_IP, _SOL_PACKET, _PACKET_STATISTICS, _SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 0x0800, 263, 6, 26, 33
_PROTOCOL_AT, _SOURCE_AT, _TARGET_AT = 9, 12, 16  # in an IPv4 header (RFC 791)

Flow = tuple[int, str, int, str, int]
"""Protocol, then host and port of who sends and of who receives."""


class Tap:
    """Records from `with` to `read`. Raises PermissionError without the right to (CAP_NET_RAW, CAP_NET_ADMIN)."""

    def __init__(self, address: str) -> None:
        """`address` is IPv4; packets of others are left out by the kernel, so their number does not matter."""
        self._address = address
        self.carried = 0  # bytes, until now
        self.datagrams = 0
        self._packets: list[bytes] = []
        self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)  # of no protocol: nothing before the filter
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_BYTES)
        number = int.from_bytes(socket.inet_aton(address), "big")
        instructions = (
            (0x20, 0, 0, _SOURCE_AT), (0x15, 2, 0, number), (0x20, 0, 0, _TARGET_AT), (0x15, 0, 1, number),
            (0x06, 0, 0, PACKET_MAX), (0x06, 0, 0, 0),
        )  # fmt: skip  # load, compare, load, compare, take, leave (McCanne and Jacobson 1993)
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
        filter = struct.pack("HL", len(instructions), ctypes.addressof(program))
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter)
        self._sock.bind(("lo", _ETH_P_IP))
        self._sock.settimeout(0.2)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._sock.close()

    def read(self) -> tuple[dict[Flow, bytes], list[bytes]]:
        """What each TCP flow carried, in one piece, and what left in datagrams. It asserts that nothing was missed.

        Any program of this machine may send a datagram there: a daemon of another test, to addresses that it made up.
        """
        self._ended.set()
        self._thread.join()
        _, missed = struct.unpack("II", self._sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        assert not missed, f"the tap has missed {missed} packets"
        flows: defaultdict[Flow, bytearray] = defaultdict(bytearray)
        datagrams = []
        for packet in self._packets:
            flow, payload = _payload(packet)
            if flow[0] == socket.IPPROTO_TCP:
                flows[flow] += payload  # in order, on loopback; what was sent twice is there twice
            elif flow[0] == socket.IPPROTO_UDP and flow[1] == self._address:
                datagrams.append(payload)
        return {flow: bytes(said) for flow, said in flows.items()}, datagrams

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                packet, about = self._sock.recvfrom(PACKET_MAX)
            except TimeoutError:
                continue
            if about[2] != socket.PACKET_OUTGOING:  # each comes past twice
                self._packets.append(packet)
                self.carried += len(packet)
                self.datagrams += packet[_PROTOCOL_AT] == socket.IPPROTO_UDP


def _payload(packet: bytes) -> tuple[Flow, bytes]:
    head, length = 4 * (packet[0] & 15), int.from_bytes(packet[2:4], "big")
    protocol = packet[9]
    source, target = (socket.inet_ntoa(packet[at : at + 4]) for at in (_SOURCE_AT, _TARGET_AT))
    body = packet[head : length or None]  # 0: longer than its field can say
    ports = struct.unpack(">HH", body[:4])
    skipped = 4 * (body[12] >> 4) if protocol == socket.IPPROTO_TCP else 8
    return (protocol, source, ports[0], target, ports[1]), body[skipped:]
