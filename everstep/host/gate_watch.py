"""What the gate on GPU health watches with: a monitor whose findings and events stay with one run, and the run's own logs."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from everstep.core.health_policy import HealthPolicy
from everstep.core.ledger import Event
from everstep.core.monitor import HISTORY_SECONDS, REMEDY, XID, MonitorJob, of_finding
from everstep.host import ledger as ledgers
from everstep.host.gate_reports import Kept
from everstep.host.gpus import GpuSampler
from everstep.host.kernel_log import open_kernel_log
from everstep.host.log_file import LogFiles, Source
from everstep.host.log_follower import LogFollower
from everstep.host.monitor import Hands, Monitor
from everstep.host.monitor_watch import HostWatch, Watch


def listen(pattern: str, *, kernel: bool) -> Watch:
    """Follow the logs of a run's ranks, and the kernel's where that is asked for and can be read."""
    sources: list[Source] = [LogFiles((pattern,))]
    if kernel and (log := open_kernel_log("")[0]):
        sources.append(log)
    watch = Watch(LogFollower(sources), None)
    watch.start()
    return watch


def tell(watch: Watch, node: str, record: Callable[..., None], since: float) -> None:
    """Append what the logs say as events, where no monitor does it. What was before `since` is no news of this run."""
    for one in watch.findings():
        sign = of_finding(one, "", time.time())
        if sign.time < since:
            continue
        told = sign.model_dump(mode="json", include={"xid", "action", "component", "device"})
        record(sign.event, severity=sign.severity, text=sign.text, at=sign.time, node=node, cause=sign.kind, **told)


def assemble(
    held: ExitStack, gpus: GpuSampler, watch: Watch, kept: Kept, every: float, policy: HealthPolicy, ledger_uri: str
) -> Monitor:
    """A monitor of this machine for one run. What it started ends with `held`."""
    host = HostWatch()
    held.callback(host.close)
    host.start()
    gpus.start()
    hands = Hands(gpus, host, watch, kept, kept)
    return Monitor(MonitorJob(every_seconds=every), hands, policy=policy, past=_past(ledger_uri))


def _past(uri: str) -> list[Event]:
    """What the ledger knows of this node: earlier Xids of its GPUs, and remedies."""
    events: list[Event] = []
    since = time.time() - HISTORY_SECONDS
    with suppress(Exception):  # a ledger that is away costs the history, and nothing else
        for kind in (XID, REMEDY):
            events += ledgers.events(uri, kind=kind, since=since)
    return events
