"""The monitor of one machine: samples at their times, Xid events at once, verdicts, and what they are told to.

`host.monitoring` runs it. Nothing that hangs (driver, mount, disk, ledger,
listener) stops it: samplers are processes with deadlines, logs and disks have threads of their own.
"""

import os
import time
import uuid as uuids
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from everstep.core.gpu import Driver, Sweep, XidEvent
from everstep.core.health import Finding, Severity, State
from everstep.core.health_policy import DEFAULT, HealthPolicy
from everstep.core.host import HostSample
from everstep.core.judgement import Evidence, NodeVerdict, Offence, judge, window
from everstep.core.ledger import Event
from everstep.core.monitor import Change, MonitorJob, ailments, changes, offences, resumed
from everstep.host.exporter import Snapshot
from everstep.host.gpus import Sampler
from everstep.host.monitor_memory import Memory, New
from everstep.host.monitor_watch import Training

SLICE_SECONDS = 0.1
STORM_SECONDS = 0.2
"""After events of causes that are known, so long until the next look: a storm is counted, not judged line by line."""

KEEP_HOSTS = 90
SILENT_SECONDS = 60.0

Tell = Callable[[Event], None]


class HostSampling(Protocol):
    """What samples the node; `everstep.host.monitor_watch.HostWatch` does."""

    def newest(self) -> HostSample | None:
        """A sample that was not given yet. Never waits."""
        ...


class Watching(Protocol):
    """What reads logs and heartbeats; `everstep.host.monitor_watch.Watch` does."""

    training: Training
    trouble: str

    @property
    def silent_s(self) -> float: ...

    @property
    def lost(self) -> int: ...

    @property
    def behind(self) -> bool: ...

    def findings(self) -> list[Finding]: ...


class Writing(Protocol):
    """What keeps samples and events; `everstep.host.monitor_writer.Writer` does. Nothing of it waits."""

    lost: int

    @property
    def lost_rows(self) -> int: ...

    @property
    def troubles(self) -> tuple[str, ...]: ...

    def take(self, sweep: Sweep | None = None, host: HostSample | None = None) -> None: ...

    def tell(self, event: Event) -> None: ...


class Showing(Protocol):
    """What shows the newest state; `everstep.host.exporter.Exporter` does."""

    def show(self, snapshot: Snapshot) -> None: ...


class Hands(NamedTuple):
    """Through what a monitor sees and speaks."""

    gpus: Sampler
    host: HostSampling
    watch: Watching
    writer: Writing
    exporter: Showing


class Monitor:
    """One node. For one thread: `step` again and again, then `close`. `clock` and `wall` may be passed.

    `tell` hears every event, after the ledger's writer; whatever it raises is its own affair and must not be raised here.
    """

    def __init__(
        self,
        job: MonitorJob,
        hands: Hands,
        tell: Tell = lambda _: None,
        *,
        policy: HealthPolicy = DEFAULT,
        past: Sequence[Event] = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self.node = job.node or os.uname().nodename
        self.sweeps_taken = self.events_told = 0
        self.verdict: NodeVerdict | None = None
        self._job = job
        self._hands = hands
        self._tell = tell
        self._policy = policy
        self._clock = clock
        self._wall = wall
        self._rest = rest
        self._told, seen = resumed(past, self.node, wall())
        self._memory = Memory(self.node, seen, offences(past, self.node))
        self._sweeps: tuple[Sweep, ...] = ()
        self._hosts: list[HostSample] = []
        self._ailing: dict[str, float] = {}
        self._sample_at = clock()

    def step(self, seconds: float = SLICE_SECONDS) -> bool:
        """Wait for an Xid, or a sample's time, for so long at most, and judge what came. Whether anything did."""
        events = self._events(max(0.0, min(seconds, self._sample_at - self._clock())))
        job = self._hands.watch.training.job
        found = self._memory.hear(events, job)
        if self._sweeps:  # before the first one nobody knows which GPU a line is about
            lines = self._hands.watch.findings()
            found += self._memory.read(lines, self._sweeps[-1].gpus, job, self._wall())
        for one in found:
            self._say_cause(one)
        due = self._clock() >= self._sample_at
        if due:
            self._sample()
            self._say_troubles()
        if due or found:
            self._judge()
        elif events:
            self._rest(max(0.0, min(STORM_SECONDS, self._sample_at - self._clock())))
        return due or bool(found)

    def remember(self, found: Iterable[Offence]) -> None:
        """Take remedies that somebody else has noted."""
        self._memory.remember(found)

    def say(
        self, kind: str, text: str, severity: Severity = Severity.low, at: float | None = None, /, **data: Any
    ) -> None:
        """Tell an event."""
        event = Event(
            id=uuids.uuid4().hex,
            time=self._wall() if at is None else at,
            kind=kind,
            severity=severity,
            job=self._hands.watch.training.job,
            text=text,
            data={"node": self.node, **data},
        )
        self.events_told += 1
        self._hands.writer.tell(event)
        self._tell(event)

    def _events(self, seconds: float) -> tuple[XidEvent, ...]:
        try:
            return self._hands.gpus.wait(seconds)
        except OSError:  # no memory, no process: the sweep says so
            return ()

    def _sample(self) -> None:
        now = self._clock()
        self._sample_at += self._job.every_seconds * max(1, -(-(now - self._sample_at) // self._job.every_seconds))
        sweep, host = self._sweep(), self._hands.host.newest()
        if self._sweeps and sweep.time < self._sweeps[-1].time - 1.0:  # the clock was set back
            self._sweeps, self._hosts = (), []
        self._sweeps = window((*self._sweeps, sweep), self._policy)
        if host is not None:
            self._hosts = [*self._hosts[1 - KEEP_HOSTS :], host]
        self.sweeps_taken += 1
        self._hands.writer.take(sweep, host)

    def _sweep(self) -> Sweep:
        try:
            return self._hands.gpus.sweep()
        except OSError as error:
            before = self._sweeps[-1] if self._sweeps else None
            silent = before.silent_s + self._wall() - before.time if before else 0.0
            why = f"no probe can be started: {error.strerror}"
            return Sweep(time=self._wall(), seconds=0.0, driver=Driver.starved, why=why, silent_s=max(0.0, silent))

    def _judge(self) -> None:
        watch = self._hands.watch
        now, training = self._wall(), watch.training if watch.silent_s < SILENT_SECONDS else Training()
        self._memory.forget(now)
        self.verdict = judge(
            Evidence(
                now=now,
                node=self.node,
                sweeps=self._sweeps,
                hosts=tuple(self._hosts),
                xids=self._memory.xids,
                findings=self._memory.findings,
                history=tuple(self._memory.history),
                training=training.computes,
                training_since=training.since,
                gpus_expected=self._job.gpus,
                job=training.job,
            ),
            self._policy,
        )
        self._told, said = changes(self._told, self.verdict)
        for change in said:
            self._say(change)
        self._show()

    def _say_cause(self, new: New) -> None:
        sign = new.sign
        self.say(
            sign.event,
            f"{self._name(sign.uuid)}: {sign.text}",
            sign.severity,
            sign.time,
            cause=f"xid-{sign.xid}" if sign.xid is not None else sign.kind,
            key=sign.key,
            index=new.index,
            count=new.count,
            **sign.model_dump(mode="json", exclude={"time", "severity", "text"}),
        )

    def _say(self, change: Change) -> None:
        verdict = change.verdict
        said = "; ".join(change.fresh or verdict.reasons[:1]) or f"it is {verdict.state.value} again"
        advised = not change.more and verdict.state not in (State.healthy, State.unknown)
        advice = f"; what to do: {verdict.action.advice}" if advised else ""
        self.say(
            change.kind,
            f"{self._name(change.uuid)}: {said}{advice}",
            change.severity,
            uuid=change.uuid,
            before=change.before.value,
            state=verdict.state.value,
            action=verdict.action.value,
            reasons=list(verdict.reasons[:50]),
        )

    def _say_troubles(self) -> None:
        """What keeps the monitor itself from its work, and when that is over."""
        writer, watch = self._hands.writer, self._hands.watch
        found = {"writing": "; ".join(writer.troubles), "logs": watch.trouble}
        if watch.silent_s >= SILENT_SECONDS:
            found["logs"] = f"logs and heartbeats have not been read for {watch.silent_s:.0f} s"
        troubles = {name: why for name, why in found.items() if why}
        self._ailing, said = ailments(self._ailing, troubles, self._wall())
        for name, why in said.items():
            if why:
                self.say(
                    "everstep.monitor.trouble", f"the monitor of node {self.node}: {why}", Severity.medium, what=name
                )
            else:
                self.say("everstep.monitor.mended", f"the monitor of node {self.node}: {name} goes on", what=name)

    def _name(self, uuid: str) -> str:
        """As one says it to a person; the number is that of the moment."""
        if not uuid:
            return f"node {self.node}"
        gpus = self._sweeps[-1].gpus if self._sweeps else ()
        index = next((one.index for one in gpus if one.uuid == uuid), None)
        return f"GPU {uuid}" if index is None else f"GPU {index} ({uuid})"

    def _show(self) -> None:
        writer, watch = self._hands.writer, self._hands.watch
        latest = self._sweeps[-1] if self._sweeps else None
        self._hands.exporter.show(
            Snapshot(
                period=self._job.every_seconds,
                sweep=latest,
                host=self._hosts[-1] if self._hosts else None,
                verdict=self.verdict,
                xids=dict(self._memory.counts),
                own={
                    "cpu_seconds_total": time.process_time(),
                    "events_total": self.events_told,
                    "lost_rows_total": writer.lost_rows,
                    "lost_samples_total": writer.lost,
                    "lost_log_total": watch.lost,
                    "probe_restarts_total": latest.restarts if latest else 0,
                    "log_behind": watch.behind,
                    "logs_read": not watch.trouble and watch.silent_s < SILENT_SECONDS,
                    "writes": not writer.troubles,
                },
            )
        )
