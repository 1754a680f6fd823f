"""What ended a rank, in one sentence and as a cause."""

import errno
import traceback
from pathlib import Path

from everstep.core.errors import Damaged, Fenced
from everstep.core.segment import Cause, CauseKind, Phase
from everstep.trainer.program import ProgramError

SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
LONGEST = 400
_OURS = tuple(str(Path(__file__).parents[1] / room) for room in ("trainer", "store", "core"))


class ProbeMismatch(Exception):
    """A restored checkpoint gives another loss on the fixed batch than when it was saved."""

    def __init__(self, folder: str, text: str) -> None:
        super().__init__(text)
        self.folder = folder


class SaveFailed(Exception):
    """A checkpoint that had to be committed could not be, after several tries."""

    def __init__(self, step: int, error: BaseException | str, number: int | None) -> None:
        super().__init__(f"the checkpoint of step {step} could not be written: {error}")
        self.number = number


def cause_of(error: BaseException, phase: Phase, rank: int, step: int) -> Cause:
    """The cause that a rank's last word names for `error`."""
    kind, key, message = _judge(error)
    return Cause(kind=kind, key=key, message=message, phase=phase, rank=rank, step=step)


def _judge(error: BaseException) -> tuple[CauseKind, str, str]:
    match error:
        case ProgramError():
            return CauseKind.user, "program", str(error)
        case Damaged():
            return CauseKind.damaged, error.where, str(error)
        case ProbeMismatch():
            return CauseKind.probe, error.folder, str(error)
        case Fenced():
            return CauseKind.fenced, "fenced", str(error)
        case SaveFailed() if error.number in SPACE:
            return CauseKind.space, errno.errorcode[error.number or 0], f"{error}; free space there and start again."
        case SaveFailed():
            return CauseKind.exception, "SaveFailed", str(error)
        case OSError() if error.errno in SPACE:
            return CauseKind.space, errno.errorcode[error.errno or 0], describe(error)
        case _:
            return CauseKind.exception, type(error).__name__, describe(error)


def describe(error: BaseException) -> str:
    """`KeyError: 'width' (train.py:12)`: type, text, and the place in the user's code where there is one."""
    text = str(error).strip()
    lines = text.splitlines() or [""]
    text = lines[-1] if text.startswith("Caught ") else lines[0]
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if text.startswith(f"{type(error).__name__}: "):
        named = text
    if len(named) > LONGEST:
        named = f"{named[:LONGEST]}..."
    place = _place(error)
    return f"{named} ({place})" if place else named


def _place(error: BaseException) -> str:
    """The innermost line that is not ours and not a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith((*_OURS, "<")) and "/site-packages/" not in frame.filename:
            if "/lib/python3" in frame.filename:
                continue
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
