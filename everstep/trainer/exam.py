"""`python -m everstep.trainer.exam`: one device put to the test, while a training may wait on it.

Reads a `core.exam.Task` from standard input, and where it `waits` a second line that lets it begin. It answers by lines of
JSON: `{"ready": true, ...}`, `{"at": part}` before each part, a `Measured` after it, and `{"done": true}`. Values are
integers of which the results are known exactly, and every one of them is compared. It takes little memory, writes no file,
and ends with all that it holds. Parts that need the device alone on its bus take turns.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from everstep.core.exam import Measured, Part, Task

Say = Callable[[Mapping[str, Any]], None]

SHARES = {Part.matmul: 0.4, Part.memory: 0.25, Part.host_copy: 0.15, Part.all_reduce: 0.2}
"""Of the seconds for measuring."""

NOT_ITS_FAULT = (
    "busy or unavailable",  # another process holds it in exclusive mode
    "driver version is insufficient",
    "no kernel image",
    "no CUDA-capable device",
    "invalid device ordinal",
    "out of memory",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # what cuBLAS says when no memory is free
    "CUBLAS_STATUS_ALLOC_FAILED",
    "system not yet initialized",  # the fabric manager does not run
    "MPS",
)
"""CUDA errors that say nothing against the device."""


def main() -> int:
    line = sys.stdin.readline()
    if not line:
        return 1
    task = Task.model_validate_json(line)
    with suppress(BrokenPipeError):
        examine(task, _voice(task), sys.stdin.readline if task.waits else None)
    sys.stdout.flush()
    os._exit(0)  # what hangs in a driver or a peer holds up nothing


def examine(task: Task, say: Say, begin: Callable[[], str] | None = None) -> None:
    """Take all parts of the test, and tell what each has found. `begin` is waited for once the device is ready."""
    try:
        from everstep.trainer import exam_device, examiner

        device = exam_device.prepare(task)
        say({"ready": True, "model": device.model})
    except Exception as error:  # noqa: BLE001 - the process edge: it is the answer
        say({"ready": True, "model": ""})
        say(_stumbled(Part.matmul, error))
        say({"done": True})
        return
    if begin is not None and not begin():
        return
    for part, look in examiner.parts(task, device):
        say({"at": part.value})
        try:
            found = look(task.seconds * SHARES[part])
        except Exception as error:  # noqa: BLE001 - the process edge: it is the answer
            say(_stumbled(part, error))
            if is_of_device(error):  # its context is lost: whatever comes next fails too
                break
        else:
            say(found.model_dump(mode="json"))
    say({"done": True})


def _stumbled(part: Part, error: Exception) -> Mapping[str, Any]:
    line = _first_line(error)
    if is_of_device(error):
        return Measured(part=part, error=line).model_dump(mode="json")
    if isinstance(error, ImportError):
        line = f"there is no torch to test it with ({line})"
    elif "out of memory" in line:
        line = f"no memory is free on it ({line})"
    return Measured(part=part, why=line).model_dump(mode="json")


def is_of_device(error: Exception) -> bool:
    """Whether it is a CUDA error that speaks against the device."""
    line = _first_line(error)
    return "CUDA error" in line and not any(words in line for words in NOT_ITS_FAULT)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _voice(task: Task) -> Say:
    import json

    descriptor = sys.stdout.fileno() if task.answer_fd is None else task.answer_fd

    def say(message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(descriptor, line) :]

    return say


if __name__ == "__main__":
    raise SystemExit(main())
