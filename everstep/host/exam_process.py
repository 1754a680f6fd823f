"""One process that puts a device to the test, and what it has said so far."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from everstep.core.exam import CPU, Measured, Part, Task
from everstep.host import process
from everstep.host.process import Process


def spawn(task: Task, device: str, command: Sequence[str], token: str, log: Path) -> "ExamProcess":
    """Start it and give it its task. It dies with the calling thread."""
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)
        task = task.model_copy(update={"answer_fd": write})
        held = (task.answer_fd, task.turn_fd, task.listen_fd)
        one = process.spawn(
            command,
            _environment(device, task),
            token,
            log,
            stdin=subprocess.PIPE,
            pass_fds=[fd for fd in held if fd is not None],
            death_signal=signal.SIGKILL,
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    process.tell(one, task.model_dump_json().encode() + b"\n")
    return ExamProcess(task.rank, device, one, read)


class ExamProcess:
    """One process, and what it has said so far."""

    def __init__(self, rank: int, device: str, one: Process, read: int) -> None:
        self.rank = rank
        self.device = device
        self.process = one
        self.read = read
        self.model = ""
        self.ready = self.late = self.done = False
        self.at: Part | None = None
        self.measured: list[Measured] = []
        self.ended = ""
        self._rest = b""
        self.hung_up = False

    @property
    def is_over(self) -> bool:
        return self.done or bool(self.ended) or self.late

    @property
    def is_lost(self) -> bool:
        """Whether it will never come to where the ranks meet."""
        return (bool(self.ended) or self.late or self.done) and not any(
            one.part is Part.all_reduce for one in self.measured
        )

    def listen(self) -> None:
        while not self.hung_up:
            try:
                data = os.read(self.read, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.hung_up = True
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._hear(line)
        if not self.done and not self.ended and (status := self.process.status()) is not None:
            self.ended = f"signal {-status}" if status < 0 else f"status {status}"

    def _hear(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            if "ready" in said:
                self.ready, self.model = True, str(said["model"])
            elif "at" in said:
                self.at = Part(said["at"])
            elif "done" in said:
                self.done = True
            else:
                self.measured.append(Measured.model_validate(said))
        except (ValueError, ValidationError, TypeError, KeyError):
            return  # what nobody understands is no answer


def _environment(device: str, task: Task) -> dict[str, str]:
    """A rank sees its own GPU only: numbers may have changed since the training began, UUIDs have not."""
    threads = str(task.threads)
    return process.child_environment(
        (),
        {
            "CUDA_VISIBLE_DEVICES": "" if device == CPU else device,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        },
    )
