"""What a monitor watches, and when it says something: once for each cause and each change of a verdict. Pure.

A verdict that gets worse is told at once; one that gets better when it has stayed so for a while, so that a reading that
wavers around a threshold is told once. A cause that stands is not told again; one that comes back after three quiet minutes is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from everstep.core.concern import ORDER
from everstep.core.health import Action, Finding, Severity, State, Verdict
from everstep.core.judgement import NodeVerdict
from everstep.core.judging_xids import NODE, Offence
from everstep.core.ledger import Event
from everstep.core.log_bursts import QUIET_SECONDS
from everstep.core.log_rules import xids
from everstep.core.record import Record

SETTLED_SECONDS = 10.0
"""So long a verdict must have been better before that is told."""

HISTORY_SECONDS = 28 * 86_400.0
"""As far back as the rules about lemon nodes look (Meta, arXiv 2410.21680)."""

XID = "everstep.gpu.xid"
REMEDY = "everstep.node.remedy"
"""Who carries out a remedy appends an event of this kind, with `data: {node, remedy}` and, for one GPU, `uuid`."""
_WORDS = re.compile(r"\b(?:S?Xid|NVLink|GPC|TPC|link|GPU|port|action|under) \d+|(?<![\w/.:-])\d[\d,.]*(?![\w:])")
_XID = re.compile(r"S?Xid \d+(?=:)")
_PART = re.compile(r"GPC \d+, TPC \d+|\blink \d+")


class MonitorJob(Record):
    """What a monitor of one machine watches, and where it leaves what it sees."""

    folder: str = Field(".everstep/telemetry", description="Telemetry and events go here, below the node's name.")
    node: str = Field("", description="The node's name; the machine's own if not given.")
    every_seconds: float = Field(1.0, ge=1.0, le=60.0, description="Between two samples.")
    minutes: float | None = Field(None, gt=0, allow_inf_nan=False, description="End after so long; never if not given.")
    gpus: int | None = Field(None, ge=0, description="How many GPUs there should be.")
    local: str | None = Field(None, description="The local tier: its heartbeats say whether a training computes.")
    persistent: str | None = Field(None, description="The persistent tier: the logs of its runs are read, too.")
    logs: tuple[str, ...] = Field((), description="Other logs of programs, as patterns such as /var/log/job-*.log.")
    kernel_log: bool = Field(True, description="Read the kernel's log, where that is allowed.")
    policy: str | None = Field(None, description="A YAML file with thresholds of your own.")
    log_policy: str | None = Field(None, description="A YAML file with your own rows for lines of logs.")
    disk_gb: float = Field(10.0, gt=0, allow_inf_nan=False, description="GB of telemetry; the oldest days go first.")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="Prometheus metrics by HTTP.")
    metrics_address: str = Field("127.0.0.1", description="Where that port listens.")
    textfile: str | None = Field(None, description="Prometheus metrics as a file; its name ends in .prom.")
    ledger: str | None = Field(
        None, description="SQLAlchemy URL of the ledger; a SQLite file in `folder` if not given."
    )

    @property
    def name(self) -> str:
        return f"monitor of {self.node or 'this machine'}"


class Standing(Record):
    """What was last told of a GPU or the node. `causes` has the time at which each reason was last seen."""

    state: State = State.healthy
    action: Action = Action.ignore_log
    causes: dict[str, float] = {}
    better_since: float | None = None


class Change(Record):
    """What is to be told: the new verdict, and the reasons that were not known. `uuid` is empty for the node.

    `more`: state and action are those that were told; only reasons are new, and nothing says that those are as grave.
    """

    uuid: str
    before: State
    verdict: Verdict
    fresh: tuple[str, ...] = ()
    more: bool = False

    @property
    def severity(self) -> Severity:
        grave = self.verdict.severity.rank < Severity.medium.rank
        return Severity.medium if self.more and grave else self.verdict.severity

    @property
    def kind(self) -> str:
        """The event's name; `note` for what blames nobody, and for more about what was told."""
        room = "gpu" if self.uuid else "node"
        noted = self.more or (self.verdict.state is State.healthy and self.before is State.healthy)
        return f"everstep.{room}.{'note' if noted else self.verdict.state.value}"


def changes(told: dict[str, Standing], found: NodeVerdict) -> tuple[dict[str, Standing], list[Change]]:
    """What is to be told of a verdict after what was told before, and what is told by then."""
    after, said = dict(told), []
    for uuid, verdict in ((NODE, found.verdict), *found.gpus.items()):
        before = told.get(uuid, Standing())
        after[uuid], change = _change(uuid, before, verdict, found.time)
        if change is not None:
            said.append(change)
    return after, sorted(said, key=lambda one: (-ORDER.index(one.verdict.state), not one.uuid, one.uuid))


def _change(uuid: str, before: Standing, verdict: Verdict, now: float) -> tuple[Standing, Change | None]:
    reasons = verdict.reasons if uuid else tuple(one for one in verdict.reasons if not one.startswith("GPU "))
    fresh = tuple(one for one in reasons if _told_as(one) not in before.causes)
    seen = {cause: at for cause, at in before.causes.items() if now - at <= QUIET_SECONDS}
    seen |= {_told_as(one): now for one in reasons}
    standing = Standing(state=verdict.state, action=verdict.action, causes=seen)
    if ORDER.index(verdict.state) < ORDER.index(before.state):
        since = now if before.better_since is None else before.better_since
        if not 0 <= now - since < SETTLED_SECONDS:
            return standing, Change(uuid=uuid, before=before.state, verdict=verdict, fresh=fresh)
        kept = {
            cause: at for cause, at in seen.items() if cause in before.causes
        }  # what is new is told when it settles
        return before.model_copy(update={"causes": kept, "better_since": since}), None
    same = (verdict.state, verdict.action) == (before.state, before.action)
    if (same and not fresh) or (not same and verdict.state is before.state is State.healthy and not fresh):
        return standing, None
    return standing, Change(uuid=uuid, before=before.state, verdict=verdict, fresh=fresh, more=same)


def cause_of(reason: str) -> str:
    """A reason without the figures that differ from one sample to the next. Names keep theirs: Xid 31, GPC 2, nvme1."""
    return _WORDS.sub(lambda found: found[0] if found[0][0].isalpha() else "#", reason)


def _told_as(reason: str) -> str:
    """An Xid is the same whichever words the driver, a log and the catalogue have for it."""
    xid = _XID.match(reason)
    return xid[0] if xid else cause_of(reason)


def ailments(
    told: Mapping[str, float], troubles: Mapping[str, str], now: float
) -> tuple[dict[str, float], dict[str, str]]:
    """What is to be told of a monitor's own troubles, by what is troubled: why, or nothing where it is over.

    `told` has when each was last seen. Trouble is told at once and once, its end when it has stayed away for a while.
    """
    over = {name for name, at in told.items() if name not in troubles and not 0 <= now - at < SETTLED_SECONDS}
    said = {name: why for name, why in troubles.items() if name not in told} | dict.fromkeys(sorted(over), "")
    seen = dict(told) | dict.fromkeys(troubles, now)
    return {name: at for name, at in seen.items() if name not in over}, said


class Sign(Record):
    """An Xid or a finding as it is told: once, however often and by whichever way it came."""

    time: float
    uuid: str
    kind: str
    xid: int | None
    action: Action
    severity: Severity
    component: str
    text: str
    device: str = ""
    part: str = ""

    @property
    def key(self) -> str:
        """What is the same cause."""
        return f"{self.uuid} xid-{self.xid}" if self.xid is not None else f"{self.uuid} {self.kind} {self.device}"

    @property
    def event(self) -> str:
        if self.xid is not None:
            return XID
        return "everstep.gpu.finding" if self.component.startswith("gpu") else "everstep.node.finding"


def of_xid(xid: int, uuid: str, time: float, bus: str = "") -> Sign:
    """An Xid event of the driver, with what the catalogue says."""
    row = xids().get(xid)
    return Sign(
        time=time,
        uuid=uuid,
        kind=row.kind if row else "xid_unknown",
        xid=xid,
        action=row.action if row else Action.diagnose_then_restart,
        severity=row.severity if row else Severity.medium,
        component=row.component if row else "gpu",
        text=f"Xid {xid}: {row.cause if row else 'a number that is in no table that is known here'}",
        device=bus,
    )


def of_finding(found: Finding, uuid: str, time: float) -> Sign:
    """A finding of a log. `uuid` is the GPU that it is about, if one is."""
    part = _PART.search(found.why)
    return Sign(
        time=time if found.time is None else found.time,
        uuid=uuid,
        kind=found.kind,
        xid=found.xid,
        action=found.action,
        severity=found.severity,
        component=found.component,
        text=found.why,
        device=found.device,
        part=part[0] if part else "",
    )


def offences(events: Iterable[Event], node: str) -> list[Offence]:
    """The past of a node as the ledger has it: its Xids, and the remedies that somebody noted (`data: {node, remedy}`)."""
    found = []
    for event in events:
        data = event.data
        if data.get("node") != node:
            continue
        known = {name: str(data.get(name) or "") for name in ("uuid", "cause", "part", "remedy", "job")}
        if known["remedy"] or event.kind == XID:
            found.append(Offence(time=event.time, node=node, **known))
    return found


def resumed(events: Sequence[Event], node: str, now: float) -> tuple[dict[str, Standing], dict[str, float]]:
    """What an earlier monitor of the node has told last: verdicts by GPU, and causes with their times."""
    told: dict[str, Standing] = {}
    seen: dict[str, float] = {}
    for event in events:
        data = event.data
        if data.get("node") != node:
            continue
        if "key" in data:
            seen[str(data["key"])] = max(event.time, seen.get(str(data["key"]), 0.0))
        if "reasons" in data and isinstance(reasons := data["reasons"], list):
            causes = {_told_as(str(one)): now for one in reasons}
            state, action = State(str(data["state"])), Action(str(data["action"]))
            told[str(data.get("uuid") or NODE)] = Standing(state=state, action=action, causes=causes)
    return told, seen
