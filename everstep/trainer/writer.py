"""The writer: a process beside each rank that turns snapshots into files, hashes, syncs and commits them.

`python -m everstep.trainer.writer <descriptor of a socket> <pid of the rank>`. It holds no state but the rank's buffers,
which it maps read-only: one that dies is started again and given the same snapshot once more. It imports no torch, so it
is there in a few milliseconds, and it leaves with its rank, whatever ends that.

Talk (see `link`): `begin` says which rank this is; `map` brings a buffer's descriptor; `write` names a folder and the files
to make from a buffer; `commit` publishes a manifest. Each is answered once; `write` reports the bytes done on its way.
"""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import queue
import secrets
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from blake3 import blake3

from everstep.store import atomic, digest, faults, room
from everstep.trainer import link

PIECE = 8 << 20
NICENESS = 5
PR_SET_PDEATHSIG = 1
SYNC_FILE_RANGE_WRITE = 2
MANIFEST = "manifest.json"

Moved = Callable[[int], None]


class Writer:
    """Serves one rank until that hangs up."""

    def __init__(self, rank_socket: socket.socket) -> None:
        self._socket = rank_socket
        self._buffers: dict[int, memoryview] = {}

    def serve(self) -> None:
        while (heard := link.receive(self._socket)) is not None:
            message, descriptors = heard
            link.send(self._socket, self._answer(message, descriptors))

    def _answer(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """What a disk refuses is an answer; other errors end the process, and its traceback is in the rank's log."""
        try:
            match message["do"]:
                case "begin":
                    faults.identify(message["rank"], stands_for=os.getppid())
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
                case "map":
                    self._map(message["buffer"], message["size"], descriptors[0])
                case "write":
                    files = write(Path(message["folder"]), message["files"], self._of(message), self._moved)
                    return {"files": files}
                case "commit":
                    commit(Path(message["folder"]), message["text"].encode())
        except OSError as error:
            said = error.strerror if room.lacks(error) else f"{type(error).__name__}: {error}"
            return {"error": said, "number": error.errno}
        return {}

    def _map(self, buffer: int, size: int, descriptor: int) -> None:
        try:
            self._buffers[buffer] = memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def _of(self, message: dict[str, Any]) -> memoryview:
        return self._buffers[message["buffer"]]

    def _moved(self, count: int) -> None:
        link.send(self._socket, {"moved": count})


def write(folder: Path, files: list[dict[str, Any]], buffer: memoryview, moved: Moved) -> list[dict[str, Any]]:
    """Write files into `folder`, each whole or absent; path, size and BLAKE3 of each.

    A file is `{"path": name, "text": text}` or `{"path": name, "tensors": [[name, dtype, shape, begin, size], ...]}`, which
    becomes a safetensors file of these places in `buffer`. Raises OSError; ENOSPC before the first byte where the device
    has too little space, with both numbers.
    """
    total = sum(len(one["text"]) if "text" in one else sum(part[4] for part in one["tensors"]) for one in files)
    faults.point("save.begin")
    faults.point("writer.begin")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (free := room.free(folder)) < total:
        raise OSError(errno.ENOSPC, room.words(folder, free, total))
    half = _Half(total // 2, moved)
    entries = []
    try:
        for one in files:
            pieces = iter([one["text"].encode()]) if "text" in one else _safetensors(one["tensors"], buffer)
            entries.append(write_file(folder / one["path"], pieces, half))
    except OSError as error:
        if room.lacks(error):
            raise OSError(error.errno, room.explain(folder, total, error)) from error
        raise
    atomic.sync_folder(folder)
    faults.point("writer.written")
    return entries


def commit(folder: Path, manifest: bytes) -> None:
    """Publish the manifest: from here on the folder is a checkpoint."""
    atomic.sync_folder(folder.parent)
    faults.point("save.before_manifest")
    faults.point("writer.before_manifest")
    beside = folder / f".{MANIFEST}.{secrets.token_hex(4)}.tmp"
    try:
        with beside.open("xb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        faults.point("save.rename")
        faults.point("writer.rename")
        beside.replace(folder / MANIFEST)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    atomic.sync_folder(folder)
    faults.point("save.after_commit")
    faults.point("writer.after_commit")


def write_file(path: Path, pieces: Iterator[memoryview | bytes], moved: Moved) -> dict[str, Any]:
    """Write a file beside, sync it, give it its name. Hashing goes on beside the writing. Removes what it began."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    size = 0
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with _Hashing() as hashing:
                for piece in pieces:
                    hashing.see(piece)
                    digest.write_all(handle, memoryview(piece))
                    _start_flushing(handle, size, len(piece))
                    size += len(piece)
                    moved(len(piece))
            os.fsync(handle)
        finally:
            os.close(handle)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return {"path": path.name, "size": size, "blake3": hashing.digest}


class _Hashing:
    """BLAKE3 in a thread of its own, at most a few pieces behind the writing."""

    def __init__(self) -> None:
        self.digest = ""
        self._hash = blake3()
        self._pieces: queue.Queue[memoryview | bytes | None] = queue.Queue(maxsize=4)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def see(self, piece: memoryview | bytes) -> None:
        if self._thread is None and len(piece) < PIECE:  # a thread costs more than a small piece
            self._hash.update(piece)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hashing", daemon=True)
            self._thread.start()
        self._pieces.put(piece)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._hash.update(piece)

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
        self.digest = self._hash.hexdigest()


def _safetensors(tensors: list[Any], buffer: memoryview) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file (https://huggingface.co/docs/safetensors): header, then the tensors as listed."""
    header, at = {}, 0
    for name, dtype, shape, _, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for begin, size in _runs(tensors):
        for start in range(begin, begin + size, PIECE):
            yield buffer[start : min(start + PIECE, begin + size)]


def _runs(tensors: list[Any]) -> Iterator[tuple[int, int]]:
    """Places in the buffer that follow each other without a gap, as one: many small tensors are few pieces."""
    start = end = -1
    for *_, begin, size in tensors:
        if begin != end:
            if end > start:
                yield start, end - start
            start = begin
        end = begin + size
    if end > start:
        yield start, end - start


class _Half:
    """Counts bytes, and passes the fault point in the middle of a rank's files once."""

    def __init__(self, half: int, moved: Moved) -> None:
        self._left = half
        self._moved = moved

    def __call__(self, count: int) -> None:
        before, self._left = self._left, self._left - count
        if before >= 0 > self._left:
            faults.point("save.mid_file")
            faults.point("writer.mid_file")
        self._moved(count)


def _start_flushing(handle: int, at: int, count: int) -> None:
    """Have the device begin with these bytes now, so that the sync at the end finds little left. A hint only."""
    if count >= PIECE and _sync_file_range is not None:
        _sync_file_range(handle, ctypes.c_int64(at), ctypes.c_int64(count), SYNC_FILE_RANGE_WRITE)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


def main(arguments: list[str]) -> int:
    """The process's life. It dies with its rank at once: whatever it had begun is no checkpoint without a manifest."""
    descriptor, parent = map(int, arguments)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 0
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # these are for the rank, which wants to save first
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as ours, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Writer(ours).serve()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
