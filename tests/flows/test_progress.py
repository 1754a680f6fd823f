"""The live line fits its terminal and leaves it clean; without a terminal there are few plain lines."""

import errno
import io
import os
import pty
import struct
from fcntl import ioctl
from termios import TIOCSWINSZ

from everstep.core.segment import Heartbeat, Lease, Phase
from everstep.host.progress import Progress, line

BEAT = Heartbeat(
    attempt=1, rank=0, pid=1, time=0.0, phase=Phase.train, step=120, progress=1, loss=0.25, step_seconds=0.5,
    samples_per_second=1234.5,
)  # fmt: skip


def test_the_line_says_all_that_is_asked():
    assert line(BEAT, 900, 100) == "step 120/900 | loss 0.2500 | 1,234 samples/s | 6 min 30 s left | durable: step 100"
    starting = BEAT.model_copy(
        update={"phase": Phase.start, "step": 0, "loss": None, "step_seconds": None, "samples_per_second": None}
    )
    assert line(starting, 900, 0) == "step 0/900 | starting | durable: none yet"
    assert "left" not in line(BEAT.model_copy(update={"step": 900}), 900, 900)


def _all_of(terminal: int) -> str:
    """Everything written to a terminal whose other side is closed: one read may give only the first write."""
    drawn = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError as gone:  # Linux answers EIO, not an empty read, once the other side is closed
            if gone.errno != errno.EIO:
                raise
            part = b""
        if not part:
            return drawn.decode()
        drawn += part


def test_it_fits_a_narrow_terminal_and_is_wiped_before_other_lines():
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(theirs, "w") as out:
        progress = Progress(900, lambda: 100, out)
        progress.show(BEAT, Lease(attempt=1))
        progress.say("segment 1 ends")
        progress.show(BEAT, Lease(attempt=1))
        progress.close()
    drawn = _all_of(ours)
    os.close(ours)
    first, _, rest = drawn.partition("segment 1 ends\r\n")
    assert first.split("\r")[1] == line(BEAT, 900, 100)[:39]
    assert first.endswith("\r" + " " * 39 + "\r")
    assert rest == "", "the next drawing comes a fifth of a second later"


def test_news_are_lines_and_other_events_are_not():
    out = io.StringIO()
    progress = Progress(900, lambda: 0, out)
    progress.hear("stop.requested", "whatever")
    progress.hear("checkpoint.quarantined", "step-00000010.a1: rank-0.json is missing.\nmore")
    progress.hear("checkpoint.saved", "")
    progress.show(None, Lease(attempt=1))
    assert out.getvalue().splitlines() == [
        "stopping: the last finished step is being saved",
        "a checkpoint is set aside: step-00000010.a1: rank-0.json is missing.",
    ]
