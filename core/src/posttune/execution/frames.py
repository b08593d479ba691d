"""Messages over a socket: a length of four bytes, then the bytes."""

from __future__ import annotations

import socket
import struct

HEADER = struct.Struct("!I")
LIMIT = 1 << 28  # bytes of a message; a longer one is a fault of its sender


def send(channel: socket.socket, payload: bytes) -> None:
    """Send one message. Raises OSError where the other side is gone, ValueError where it is too long."""
    if len(payload) > LIMIT:
        raise ValueError(f"a message of {len(payload):,} bytes; at most {LIMIT:,} are sent")
    channel.sendall(HEADER.pack(len(payload)) + payload)


def receive(channel: socket.socket) -> bytes | None:
    """The next message; None where the other side is gone, or sent what is no message."""
    head = _exactly(channel, HEADER.size)
    if head is None:
        return None
    (size,) = HEADER.unpack(head)
    return _exactly(channel, size) if size <= LIMIT else None


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = channel.recv(min(size - len(parts), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
