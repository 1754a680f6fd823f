"""A monitor on a stage: what GPUs, node and logs say is given, and time is passed in."""

from types import SimpleNamespace

from rigs import telemetry as rig

from everstep.core.monitor import MonitorJob
from everstep.host.exporter import Exporter
from everstep.host.monitor import Hands, Monitor
from everstep.host.monitor_watch import Training


class Stage:
    """Hands of a monitor, and its clock. `gpu` gives the readings of a GPU by its number; `told` are the events."""

    def __init__(self, gpus=2, period=1.0, **job):
        self.now = 0.0
        self.gpus = [{} for _ in range(gpus)]
        self.node = {}
        self.queue, self.lines, self.told, self.kept = [], [], [], []
        self.sweeper = self._sweep
        self.watch = SimpleNamespace(
            training=Training(), trouble="", silent_s=0.0, lost=0, behind=False, findings=self._findings
        )
        self.writer = SimpleNamespace(lost=0, lost_rows=0, troubles=(), take=self._take, tell=self.kept.append)
        self.exporter = Exporter(wall=self.wall)
        self.hands = Hands(self, self, self.watch, self.writer, self.exporter)
        self.job = MonitorJob(node="n1", every_seconds=period, **job)
        self.monitor = self.open()
        self._host_at = self.now

    def open(self, past=()):
        return Monitor(
            self.job, self.hands, self.told.append, past=past, clock=lambda: self.now, wall=self.wall, rest=self.rest
        )

    def wall(self):
        return rig.NOW + self.now

    def rest(self, seconds):
        self.now += seconds

    def run(self, seconds, until=lambda: False, step=10.0):
        """Let the monitor work for so long, or until something holds; whether it does."""
        end = self.now + seconds
        while self.now < end and not until():
            self.monitor.step(step)
        return until()

    def kinds(self, since=0):
        return [one.kind.removeprefix("everstep.") for one in self.told[since:]]

    # what the monitor sees

    def sweep(self):
        return self.sweeper()

    def _sweep(self):
        return rig.sweep(*(rig.gpu(number, **own) for number, own in enumerate(self.gpus)), time=self.wall())

    def wait(self, seconds):
        if not self.queue:
            self.now += max(seconds, 0.001)
        found, self.queue = tuple(self.queue), []
        return found

    def last(self, uuid):
        return None

    def close(self):
        pass

    def newest(self):
        if self.now < self._host_at:
            return None
        self._host_at = self.now + 10.0
        return rig.host(**{"time": self.wall()} | {name: made(self.wall()) if callable(made) else made for name, made in self.node.items()})  # fmt: skip

    def _findings(self):
        found, self.lines[:] = list(self.lines), []
        return found

    def _take(self, sweep=None, host=None):
        pass
