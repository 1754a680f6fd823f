"""The words in which findings, verdicts and decisions speak: actions, severities and the verdict itself.

What fills a verdict (samples, Xid events, logs) comes with the GPU health room; recovery already speaks its words.
"""

from enum import StrEnum

from everstep.core.record import Record


class Severity(StrEnum):
    """How bad; ordered from worst to least by `rank`."""

    critical = "critical"
    high = "high"
    medium = "medium"
    low = "low"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class Action(StrEnum):
    """What the fleet does about a finding. Sources for each code stand in the catalogues."""

    ignore_log = "ignore_log"
    log_then_reset_gpu_when_idle = "log_then_reset_gpu_when_idle"
    retry_backoff = "retry_backoff"
    restart_app = "restart_app"
    diagnose_then_restart = "diagnose_then_restart"
    remount_then_restart = "remount_then_restart"
    follow_primary = "follow_primary"
    fix_app = "fix_app"
    fix_config = "fix_config"
    free_space = "free_space"
    check_storage = "check_storage"
    check_network = "check_network"
    reset_gpu = "reset_gpu"
    drain_then_reset_gpu = "drain_then_reset_gpu"
    reboot_node = "reboot_node"
    drain_replace = "drain_replace"

    @property
    def advice(self) -> str:
        """The action as one says it to a person."""
        return _ADVICE[self]


_ADVICE = {
    Action.ignore_log: "nothing needs to be done",
    Action.log_then_reset_gpu_when_idle: "reset the GPU when it is next idle",
    Action.retry_backoff: "wait and try again",
    Action.restart_app: "run the same command again",
    Action.diagnose_then_restart: "find out what is wrong with this machine, then run the same command again",
    Action.remount_then_restart: "mount the file system anew, then run the same command again",
    Action.follow_primary: "look for the first fault; this one follows from it",
    Action.fix_app: "mend the program or its settings, then run the same command again",
    Action.fix_config: "mend the machine's configuration, then run the same command again",
    Action.free_space: "free some space, then run the same command again",
    Action.check_storage: "check the storage, then run the same command again",
    Action.check_network: "check the network, then run the same command again",
    Action.reset_gpu: "reset the GPU",
    Action.drain_then_reset_gpu: "drain the node, then reset its GPUs",
    Action.reboot_node: "reboot the node",
    Action.drain_replace: "drain the node and have it replaced",
}


class Finding(Record):
    """What one cause in a log means, and what to do about it.

    `kind` is the name of the cause, `xid` the driver's number where it printed one. `component` says whose fault it is
    (`gpu/memory`, `application`, `storage/nfs`, ...), `device` which one as it is printed (a PCI address, a disk, a
    server). `time` is the first time it was seen, in Unix seconds; None where the log does not tell.
    """

    kind: str
    xid: int | None = None
    component: str
    severity: Severity
    action: Action
    why: str
    time: float | None = None
    device: str = ""


class State(StrEnum):
    """What the gates say of a node or GPU. Unknown is not failed."""

    healthy = "healthy"
    suspect = "suspect"
    failed = "failed"
    unknown = "unknown"


class Verdict(Record):
    """A judgement that carries what to do."""

    state: State
    reasons: tuple[str, ...] = ()
    action: Action = Action.ignore_log
    severity: Severity = Severity.low
