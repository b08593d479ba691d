"""Messages over a socket: a length of four bytes, then the bytes."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("!I")
LIMIT = 1 << 28  # bytes of a message; a longer one is a fault of its sender


def send(channel: socket.socket, payload: bytes) -> None:
    """Send one message. Raises OSError where the other side is gone, ValueError where it is too long."""
    if len(payload) > LIMIT:
        raise ValueError(f"a message of {len(payload):,} bytes; at most {LIMIT:,} are sent")
    channel.sendall(HEADER.pack(len(payload)) + payload)


def tell(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one message as JSON."""
    send(channel, json.dumps(message).encode())


def receive(channel: socket.socket) -> bytes | None:
    """The next message; None where the other side is gone, or sent what is no message."""
    head = _exactly(channel, HEADER.size)
    if head is None:
        return None
    (size,) = HEADER.unpack(head)
    return _exactly(channel, size) if size <= LIMIT else None


def receive_by(channel: socket.socket, deadline: float) -> bytes | None:
    """As ``receive``, until ``deadline`` on time.monotonic()'s clock. Raises TimeoutError."""

    def patience() -> float:
        return max(deadline - time.monotonic(), 0.001)

    head = _exactly(channel, HEADER.size, patience)
    if head is None:
        return None
    (size,) = HEADER.unpack(head)
    return _exactly(channel, size, patience) if size <= LIMIT else None


def _exactly(channel: socket.socket, size: int, patience: Callable[[], float] | None = None) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        if patience is not None:
            channel.settimeout(patience())
        try:
            part = channel.recv(min(size - len(parts), 1 << 20))
        except TimeoutError:
            if patience is not None:
                raise
            return None
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
