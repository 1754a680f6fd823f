"""What a node reads at one moment, apart from its GPUs. `None` is "not measured": never a pass, never a fail."""

from enum import StrEnum

from pydantic import Field

from everstep.core.record import Record


class Looked(StrEnum):
    """What came of looking at a mount or a port."""

    ok = "ok"
    hung = "hung"  # no answer within the deadline
    error = "error"  # an error in place of an answer


class Mount(Record):
    """A mounted file system that holds data."""

    path: str
    source: str = Field(default="", description="device or server, as the kernel names it")
    kind: str = Field(default="", description="ext4, nfs4, fuse.x and so on")
    read_only: bool | None = None
    looked: Looked = Looked.ok
    why: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = Field(default=None, description="that an ordinary user can still write")
    files_total: int | None = Field(default=None, description="inodes; None where the file system does not count them")
    files_free: int | None = None

    @property
    def used_percent(self) -> float | None:
        """As df counts it: of what an ordinary user could use."""
        if not self.total_bytes or self.free_bytes is None:
            return None
        return 100 * (1 - self.free_bytes / self.total_bytes)


class Pressure(Record):
    """Pressure stall information: percent of the time in which some, or all, tasks waited (kernel: PSI)."""

    some_10s: float
    some_60s: float
    full_10s: float | None = None
    full_60s: float | None = None


class Memory(Record):
    """The memory of the node."""

    total_bytes: int | None = None
    available_bytes: int | None = Field(default=None, description="the kernel's estimate of what can be had")
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    oom_kills: int | None = Field(default=None, description="since boot")
    pressure: Pressure | None = None
    io_pressure: Pressure | None = None


class StuckTask(Record):
    """A task in uninterruptible sleep (D). `seconds` counts from the first look that found it so."""

    pid: int
    task: int
    name: str
    kernel: bool = Field(description="a thread of the kernel itself")
    seconds: float
    waits_in: str = Field(default="", description="the kernel function, where it is shown")


class Clock(Record):
    """How far the clock is off, as the daemon or the kernel estimates it."""

    source: str = Field(description="chrony or kernel")
    synchronised: bool | None = None
    offset_s: float | None = Field(default=None, description="estimated; positive: this clock is ahead")
    error_bound_s: float | None = Field(default=None, description="it is off by no more than this, by their account")


class Nic(Record):
    """A network interface with hardware behind it. Counters count since the driver's start."""

    name: str
    up: bool | None = None
    carrier: bool | None = None
    speed_mbit: int | None = None
    carrier_changes: int | None = None
    counters: dict[str, int] = {}


class IbPort(Record):
    """A port of an InfiniBand or RoCE adapter."""

    device: str
    port: int
    looked: Looked = Looked.ok
    why: str = ""
    state: str = Field(default="", description="ACTIVE, DOWN, INIT, ARMED")
    physical: str = Field(default="", description="LinkUp, Polling, Disabled")
    layer: str = Field(default="", description="InfiniBand or Ethernet")
    rate_gbit: float | None = None
    counters: dict[str, int] = Field(default={}, description="by the names of the kernel; hardware counters among them")


class HostSample(Record):
    """A node at one moment. A group that could not be read is None; `unanswered` names what hung."""

    time: float = Field(description="Unix seconds, UTC")
    node: str
    seconds: float = Field(description="how long it took")
    boot_id: str = ""
    uptime_s: float | None = None
    mounts: tuple[Mount, ...] | None = None
    memory: Memory | None = None
    stuck: tuple[StuckTask, ...] | None = None
    clock: Clock | None = None
    nics: tuple[Nic, ...] | None = None
    ports: tuple[IbPort, ...] | None = None
    pci_gpus: tuple[str, ...] | None = Field(default=None, description="NVIDIA GPUs that the PCI bus shows, by address")
    unanswered: tuple[str, ...] = ()
    troubles: dict[str, str] = {}
    left_behind: int = Field(default=0, description="helper processes that could not be killed and still hang")

    def mount_of(self, path: str) -> Mount | None:
        """The mount on which `path`, an absolute path, lies."""
        holds = [one for one in self.mounts or () if path == one.path or path.startswith(one.path.rstrip("/") + "/")]
        return max(holds, key=lambda one: len(one.path), default=None)
