"""Messages between a rank and its writer: length and JSON over a stream socket, with descriptors where there are any."""

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 4


def send(to: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message whole. Raises BrokenPipeError or ConnectionResetError if nobody is there."""
    data = json.dumps(message, separators=(",", ":")).encode()
    head = _LENGTH.pack(len(data))
    if descriptors:
        socket.send_fds(to, [head], list(descriptors))
        to.sendall(data)
    else:
        to.sendall(head + data)


def receive(by: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the descriptors that came with it; None if the other side has hung up."""
    head, descriptors, _, _ = socket.recv_fds(by, _LENGTH.size, _MOST_DESCRIPTORS)
    if not head:
        return None
    head += _exactly(by, _LENGTH.size - len(head))
    try:
        return json.loads(_exactly(by, *_LENGTH.unpack(head))), list(descriptors)
    except EOFError:
        for one in descriptors:
            os.close(one)
        return None


def _exactly(by: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = by.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
