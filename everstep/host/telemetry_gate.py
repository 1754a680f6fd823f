"""The telemetry of each segment, held against a Great Expectations suite beside the next segment.

The suite runs in a process of its own (`host.telemetry_suite`), one at a time: telemetry of a segment that ends meanwhile
waits and is judged together with the next one's. Frames stay in the run directory: `telemetry/segment-000012.parquet`.
"""

import shutil
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

from everstep.core.check import GateReport, not_measured
from everstep.core.errors import Damaged
from everstep.core.gpu import Sweep
from everstep.core.telemetry import gpu_rows
from everstep.host import process
from everstep.host.process import Process
from everstep.host.telemetry_suite import ABOUT, FRAME, REPORT, TASK, TelemetryTask
from everstep.store import atomic

COMMAND = (sys.executable, "-m", "everstep.host.telemetry_suite")
SECONDS = 120.0
MOST_ROWS = 40_000
KEPT = 20


class TelemetryGate:
    """For one thread. `home` is a folder of the run, `scratch` one on the local tier."""

    def __init__(
        self, home: Path, scratch: Path, token: str, node: str, period: float, *, command: Sequence[str] = COMMAND
    ) -> None:
        self._home = home
        self._scratch = scratch
        self._token = f"{token}/telemetry"
        self._node = node
        self._period = period
        self._command = tuple(command)
        self._sweeps: deque[Sweep] = deque(maxlen=MOST_ROWS)
        self._began = time.time()
        self._asked: tuple[TelemetryTask, float] | None = None
        self._due: tuple[int | None, int, float] | None = None
        self._process: Process | None = None

    def take(self, sweep: Sweep) -> None:
        """A sweep of the segment that runs."""
        self._sweeps.append(sweep)

    def ends(self, step: int | None, segment: int, hottest_c: float) -> None:
        """A segment has ended: what was taken is to be judged."""
        self._due = (step, segment, hottest_c)

    def poll(self, used: Collection[str]) -> GateReport | None:
        """A report that has come. Begins the next judgement where one is due and none runs."""
        report = self._finished()
        if self._process is None and self._due is not None:
            self._begin(*self._due, used)
            self._due = None
        return report

    def close(self) -> None:
        """End what still runs."""
        if self._process is not None:
            self._process.kill_group()
            self._process.wait(2.0)
            self._process.close()
            self._process = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _begin(self, step: int | None, segment: int, hottest_c: float, used: Collection[str]) -> None:
        sweeps = list(self._sweeps)
        rows = [row for one in sweeps for row in gpu_rows(one, self._node) if row["uuid"] in used]
        if not rows:
            return
        import pyarrow as pa  # it takes a while, and most runs on a CPU never come here
        import pyarrow.parquet as pq

        from everstep.host.telemetry import SCHEMAS

        self._sweeps.clear()
        began, self._began = self._began, time.time()
        task = TelemetryTask(
            step=step,
            segment=segment,
            uuids=tuple(sorted(used)),
            period=self._period,
            span=max(0.0, self._began - max(began, sweeps[0].time)),
            hottest_c=hottest_c,
            seconds=SECONDS,
        )
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True, mode=0o700)
        pq.write_table(pa.Table.from_pylist(rows[-MOST_ROWS:], SCHEMAS["gpus"]), self._scratch / FRAME)
        atomic.write(self._scratch / TASK, task.to_json().encode(), sync=False)
        self._keep(segment)
        quiet = {"GX_ANALYTICS_ENABLED": "False", "TQDM_DISABLE": "1", "TMPDIR": str(self._scratch)}
        env = process.child_environment((), quiet | {"OMP_NUM_THREADS": "1"})
        argv = [*self._command, str(self._scratch)]
        self._process = process.spawn(argv, env, self._token, self._home.parent / "logs" / "gate.log")
        self._asked = (task, time.monotonic() + SECONDS)

    def _keep(self, segment: int) -> None:
        """The frame beside the run, the newest ones."""
        self._home.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._scratch / FRAME, self._home / f".segment-{segment:06d}.tmp")
        (self._home / f".segment-{segment:06d}.tmp").replace(self._home / f"segment-{segment:06d}.parquet")
        for path in sorted(self._home.glob("segment-*.parquet"))[:-KEPT]:
            path.unlink(missing_ok=True)

    def _finished(self) -> GateReport | None:
        if self._process is None or self._asked is None:
            return None
        task, until = self._asked
        try:
            report = GateReport.parse((self._scratch / REPORT).read_bytes(), str(self._scratch), REPORT)
        except (FileNotFoundError, Damaged):
            status = self._process.status()
            if status is None and time.monotonic() < until:
                return None
            why = f"no answer in {SECONDS:.0f} s" if status is None else f"its process ended with status {status}"
            unknown = not_measured(ABOUT, "the suite can be evaluated", why)
            report = GateReport(gate=ABOUT, time=time.time(), step=task.step, segment=task.segment, checks=(unknown,))
        self.close()
        self._asked = None
        return report
