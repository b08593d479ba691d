"""Messages between the trainer and the engine's process: plain JSON and a block of bytes, never pickle."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct("<QQ")  # bytes of the JSON, bytes of the block
_STEP = 1 << 20


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a pair of sockets."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: dict[str, Any], block: bytes = b"") -> None:
        """Raises Closed where nobody listens."""
        text = json.dumps(message).encode()
        try:
            self._socket.sendall(_HEAD.pack(len(text), len(block)) + text)
            if block:
                self._socket.sendall(block)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, timeout: float | None = None) -> tuple[dict[str, Any], bytes]:
        """The next message. Raises Closed, and TimeoutError if its first byte is late."""
        self._socket.settimeout(timeout)
        head = self._exactly(_HEAD.size)
        self._socket.settimeout(None)
        size, block = _HEAD.unpack(head)
        message: dict[str, Any] = json.loads(self._exactly(size))
        return message, self._exactly(block)

    def close(self) -> None:
        """Twice is fine."""
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(size - len(parts), _STEP))
            except TimeoutError:
                raise
            except OSError as error:
                raise Closed(str(error)) from error
            if not part:
                raise Closed("the connection ended")
            parts += part
        return bytes(parts)
