"""Lines that carry a number of the NVIDIA driver: NVRM Xid, nvidia-nvswitch SXid, and what fabric manager and k8s plugin say.

What the rest of a line says goes before the row of the catalogue: the number of Xid 154, the reset flags of 94 and 95,
Fatal and Nonfatal of NVLink 5, spare rows in 64, the primary that 45 names.
"""

import re
from typing import NamedTuple

from everstep.core.health import Action, Severity
from everstep.core.log_rules import Row, sxids, xids

_ADDRESS = r"(?P<device>[0-9a-fA-F]{4,8}(?::[0-9a-fA-F]{2}){1,2}(?:\.[0-7])?|GPU-[0-9a-fA-F-]{8,40})"
XID = re.compile(r"NVRM: Xid \((?:PCI:)?" + _ADDRESS + r"\): (?P<code>\d{1,5})(?=,|\s*$|\s+\(|\s+Recommended Action)")
SXID = re.compile(
    r"(?P<switch>nvidia-nvswitch\d{1,3}): SXid \((?:PCI:)?" + _ADDRESS + r"\): (?P<code>\d{1,6})(?=,|\s*$)(?P<rest>.*)"
)
FABRIC = re.compile(
    r"detected NVSwitch (?P<mark>fatal|non-fatal) error (?P<code>\d{1,6})\b(?:.{0,80}pci bus id (?P<device>[0-9a-fA-F:.]{7,16}))?"
)
PLUGIN = re.compile(r"XidCriticalError: Xid=(?P<code>\d{1,5}) on Device=(?P<device>GPU-[0-9a-fA-F-]{8,40})")
_MARK = re.compile(r"\b(?P<mark>[Nn]on-?[Ff]atal|[Ff]atal)\b")
_RESET = re.compile(r"(?<![\w-])RST: (?P<reset>Yes|No)(?:, D-RST: (?P<drain>Yes|No))?")
_ADVICE = re.compile(r"\bto (?P<number>0x[0-9a-fA-F]{1,4})\b(?: \((?P<text>[^)]{1,60}))?")
_PREVIOUS = re.compile(r"caused by previous Xid (?P<code>\d{1,5})\b")
_SPENT = re.compile(
    r"(?i)all reserved rows|no (?:more )?spare rows|spare rows? (?:are )?exhausted|no (?:reserved|free) rows?"
)
_UNIT = re.compile(r"\(GPC (?P<gpc>\d{1,3}), TPC (?P<tpc>\d{1,3})|\b[Ll]ink (?P<link>-?\d{1,3})\b")
_NUMBERS = {
    0: (Action.ignore_log, Severity.low, "None: nothing needs to be done any more"),
    1: (Action.reset_gpu, Severity.critical, "GPU reset required"),
    2: (Action.reboot_node, Severity.critical, "node reboot required"),
    3: (Action.drain_then_reset_gpu, Severity.high, "drain: no new work that talks to other GPUs"),
    4: (Action.drain_then_reset_gpu, Severity.critical, "drain, then reset"),
}  # the number is the key: texts differ by driver (node reboot, OS reboot)


class Read(NamedTuple):
    """One line, understood. `unit` is the part of the device (GPC and TPC, link), `primary` the Xid that it follows from."""

    kind: str
    component: str
    severity: Severity
    action: Action
    why: str
    device: str = ""
    xid: int | None = None
    sxid: int | None = None
    unit: str = ""
    primary: int | None = None
    detail: bool = False


def read_xid(found: re.Match[str], rest: str) -> Read:
    """An Xid line. `rest` is what stands behind the number, with the lines that continue it."""
    code = int(found["code"])
    row = xids().get(code)
    device = pci(found["device"])
    if row is None:
        why = f"Xid {code} is in no table that is known here: hold the GPU for inspection"
        return Read("xid_unknown", "gpu", Severity.medium, Action.diagnose_then_restart, why, device, code)
    read = _by_row(row, device)
    unit = _UNIT.search(rest)
    if unit is not None:
        read = read._replace(unit=f"GPC {unit['gpc']}, TPC {unit['tpc']}" if unit["gpc"] else f"link {unit['link']}")
    if code == 154:
        return _advice(read, rest)
    if code in (94, 95):
        return _reset_flags(read, rest)
    if 144 <= code <= 150:
        return _nvlink5(read, rest)
    if code == 64 and _SPENT.search(rest):
        why = f"{read.why}; no spare rows are left, so a reset cannot mend it"
        return read._replace(action=Action.drain_replace, why=why)
    if previous := _PREVIOUS.search(rest):
        primary = int(previous["code"])
        return read._replace(primary=primary, why=f"{read.why}; it names its cause: act on Xid {primary}")
    return read


def read_sxid(found: re.Match[str]) -> Read:
    """An SXid line of the kernel."""
    mark = _MARK.match(found["rest"].lstrip(", "))
    read = _switch(int(found["code"]), None if mark is None else "on" not in mark["mark"].lower(), pci(found["device"]))
    link = _UNIT.search(found["rest"])
    unit = f"link {link['link']}" if link is not None and link["link"] else ""
    return read._replace(unit=unit)


def read_fabric(found: re.Match[str]) -> Read:
    """What the fabric manager says of an SXid."""
    return _switch(int(found["code"]), found["mark"] == "fatal", pci(found["device"] or ""))


def pci(address: str) -> str:
    """A PCI address as the driver prints it, in one form: 0000:a1:00. NVIDIA's devices have function 0 only."""
    if address.startswith("GPU-"):
        return address
    domain, _, rest = address.lower().removesuffix(".0").partition(":")
    return f"{domain[-4:] if len(domain) == 8 and domain.startswith('0000') else domain}:{rest}" if rest else domain


def _by_row(row: Row, device: str) -> Read:
    why = f"Xid {row.code}: {row.cause}"
    return Read(row.kind, row.component, row.severity, row.action, why, device, row.code)


def _advice(read: Read, rest: str) -> Read:
    found = _ADVICE.search(rest)
    number = int(found["number"], 16) if found is not None else None
    if number is None or number not in _NUMBERS:
        said = "an action of an unknown number" if found is not None else "an action that the line does not name"
        return read._replace(why=f"Xid 154: the driver wants {said}")
    action, severity, said = _NUMBERS[number]
    return read._replace(action=action, severity=severity, why=f"Xid 154: the driver says what to do: {said}")


def _reset_flags(read: Read, rest: str) -> Read:
    """A flag can ask for more than the row does, never for less: 95 has taken every process whatever its flags say."""
    found = _RESET.search(rest)
    if found is None:
        return read
    if found["drain"] == "Yes" and found["reset"] == "No":
        why = f"{read.why}; the line asks for a drain and a reset (D-RST: Yes)"
        return read._replace(action=Action.drain_then_reset_gpu, why=why)
    if found["reset"] == "Yes":
        return read._replace(action=Action.reset_gpu, why=f"{read.why}; the line asks for a reset (RST: Yes)")
    return read._replace(why=f"{read.why}; the line asks for no reset (RST: No)")


def _nvlink5(read: Read, rest: str) -> Read:
    mark = _MARK.search(rest)
    if mark is None:
        return read._replace(why=f"{read.why}; the line says neither Fatal nor Nonfatal")
    if "on" in mark["mark"].lower():
        why = f"{read.why}; Nonfatal: obey Xid 154 if one is printed"
        return read._replace(kind="nvlink5_nonfatal", action=Action.restart_app, severity=Severity.medium, why=why)
    return read._replace(
        kind="nvlink5_fatal",
        action=Action.drain_then_reset_gpu,
        severity=Severity.critical,
        why=f"{read.why}; Fatal: the link is down",
    )


def _switch(code: int, fatal: bool | None, device: str) -> Read:
    row = sxids().get(code)
    kind = "sxid" if fatal is None else "sxid_fatal" if fatal else "sxid_nonfatal"
    if row is None:
        why = f"SXid {code} is in no table that is known here"
        read = Read(kind, "nvswitch", Severity.medium, Action.diagnose_then_restart, why, device, sxid=code)
    else:
        read = Read(kind, row.component, row.severity, row.action, f"SXid {code}: {row.cause}", device, sxid=code)
    if fatal and read.severity in (Severity.medium, Severity.low):
        why = f"{read.why}; the line calls it fatal"
        return read._replace(severity=Severity.critical, action=Action.drain_then_reset_gpu, why=why)
    if fatal is False and row is not None and row.lives == "no if Fatal":
        why = f"{read.why}; the line calls it non-fatal"
        return read._replace(severity=Severity.medium, action=Action.ignore_log, why=why)
    return read
