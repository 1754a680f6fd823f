"""The stand-in for NVML: the real pynvml reads from it, in processes of their own, what a test or drill has set."""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rigs import nvml

from everstep.sim.nvml import FakeNvml, build, layout

HELLO = """
import json, time
import pynvml as N
N.nvmlInit()
H = [N.nvmlDeviceGetHandleByIndex(i) for i in range(N.nvmlDeviceGetCount())]
def error(call, *arguments):
    try:
        call(*arguments)
    except N.NVMLError as raised:
        return raised.value
    return 0
"""


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    return nvml.node(tmp_path, 4)


def test_pynvml_reads_what_was_set(fake):
    fake.train()
    fake.set(2, temperature=91, ecc_uncorrected_aggregate=3, retired_double=2, link_active_5=0, link_crc_5=912)
    fake.set(2, remap_pending=1, recovery=1, headroom=-4)
    fake.processes(2, {4242: 59 * layout.GIB, 17: -1})
    said = nvml.tell(
        fake,
        HELLO
        + """
h = H[2]
t = N.c_nvmlEccSramErrorStatus_v1_t()
N.nvmlDeviceGetSramEccErrorStatus(h, N.byref(t))
print(json.dumps({
    "count": len(H),
    "uuid": N.nvmlDeviceGetUUID(h),
    "bus": N.nvmlDeviceGetPciInfo(h).busId,
    "driver": N.nvmlSystemGetDriverVersion(),
    "util": N.nvmlDeviceGetUtilizationRates(h).gpu,
    "used": [N.nvmlDeviceGetMemoryInfo(h).used, N.nvmlDeviceGetMemoryInfo(h, N.nvmlMemory_v2).used],
    "temperature": [N.nvmlDeviceGetTemperature(h, 0), N.nvmlDeviceGetTemperatureV(h, 0)],
    "slowdown": N.nvmlDeviceGetTemperatureThreshold(h, N.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    "margin": N.nvmlDeviceGetMarginTemperature(h),
    "ecc": [[N.nvmlDeviceGetTotalEccErrors(h, a, b) for a in (0, 1)] for b in (0, 1)],
    "rows": N.nvmlDeviceGetRemappedRows(h),
    "pages": len(N.nvmlDeviceGetRetiredPages(h, 1)),
    "links": [N.nvmlDeviceGetNvLinkState(h, i) for i in (4, 5)],
    "crc": [N.nvmlDeviceGetNvLinkErrorCounter(h, i, N.NVML_NVLINK_ERROR_DL_CRC_FLIT) for i in (4, 5)],
    "fields": [(f.nvmlReturn, f.value.siVal) for f in N.nvmlDeviceGetFieldValues(h, [230, (163, 5), 193, 99])],
    "processes": [(p.pid, p.usedGpuMemory) for p in N.nvmlDeviceGetComputeRunningProcesses(h)],
    "sram": t.bThresholdExceeded,
    "by_uuid": N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByUUID(N.nvmlDeviceGetUUID(h).encode())),
    "encoder": error(N.nvmlDeviceGetEncoderUtilization, h),
}))
""",
    )
    used = 71 * layout.GIB
    assert said == {
        "count": 4,
        "uuid": fake.uuid(2),
        "bus": fake.bus(2),
        "driver": "580.95.05",
        "util": 98,
        "used": [used + (640 << 20), used],
        "temperature": [91, 91],
        "slowdown": 89,
        "margin": -4,
        "ecc": [[0, 0], [0, 3]],
        "rows": [0, 0, 1, 0],
        "pages": 2,
        "links": [1, 0],
        "crc": [0, 912],
        "fields": [[0, 1], [0, 912], [0, -5], [3, 0]],
        "processes": [[4242, 59 * layout.GIB], [17, None]],
        "sram": 0,
        "by_uuid": 2,
        "encoder": 3,
    }


def test_struct_of_another_version_is_refused(fake):
    said = nvml.tell(fake, HELLO + "print(json.dumps(error(N.nvmlDeviceGetMemoryInfo, H[0], N.nvmlMemory_v2 + 1)))")
    assert said == 25  # NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def test_every_function_of_the_header_is_there(fake):
    """Programs that bind all symbols when they start fail for want of one."""
    header = build._header().read_text()
    declared = set(re.findall(r"\bDECLDIR\s*\*?\s*(nvml\w+)\s*\(", header))
    assert len(declared) > 300
    names = sorted(declared | {"nvmlErrorString"})
    code = f"import ctypes, json; l = ctypes.CDLL('libnvidia-ml.so.1'); print(json.dumps([n for n in {names} if not hasattr(l, n)]))"
    assert nvml.tell(fake, code) == []


def test_change_is_seen_by_a_process_that_runs(fake):
    code = (
        HELLO
        + """
import sys
def now():
    return [error(N.nvmlDeviceGetTemperature, h, 0) or N.nvmlDeviceGetTemperature(h, 0) for h in H]
for line in sys.stdin:
    print(json.dumps(now()), flush=True)
"""
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=fake.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:

        def ask() -> list[int]:
            child.stdin.write("\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        assert ask() == [34, 34, 34, 34]
        fake.set(1, temperature=88)
        assert ask() == [34, 88, 34, 34]
        fake.lose(1)
        assert ask() == [34, 15, 34, 34]
        fake.lose(1, lost=False)
        fake.set(2, reset_required=1)
        fake.fail("temperature", gpu=3, error=999)
        assert ask() == [34, 88, 16, 999]
        fake.remove(0)
        assert ask()[0] == 15  # whoever holds it has lost it
        child.stdin.close()
        child.wait(30)


def test_removed_gpu_renumbers_the_others_for_who_comes_later(fake):
    fake.remove(1)
    names = HELLO + "print(json.dumps([N.nvmlDeviceGetUUID(h) for h in H]))"
    assert nvml.tell(fake, names) == [fake.uuid(0), fake.uuid(2), fake.uuid(3)]
    fake.order(3, 1, 0, 2)
    assert nvml.tell(fake, names) == [fake.uuid(gpu) for gpu in (3, 1, 0, 2)]


def test_driver_that_is_not_loaded_or_refuses(fake):
    code = "import json, pynvml as N\ntry:\n N.nvmlInit(); print(0)\nexcept N.NVMLError as e: print(e.value)"
    fake.unload()
    assert nvml.tell(fake, code) == 9
    fake.load()
    fake.system("nvmlInit", error=18)
    assert nvml.tell(fake, code) == 18
    fake.system("nvmlInit")
    assert nvml.tell(fake, code) == 0


def test_hang_ends_after_its_time_or_when_it_is_told_to(fake):
    timed = HELLO + "\nt = time.monotonic(); N.nvmlDeviceGetPowerUsage(H[1]); print(json.dumps(time.monotonic() - t))"
    fake.hang("power", gpu=1, seconds=0.3)
    assert nvml.tell(fake, timed) > 0.29
    fake.hang("power", gpu=1)
    timer = threading.Timer(1.0, fake.answer, ("power",))
    began = time.monotonic()
    timer.start()
    nvml.tell(fake, timed)
    assert time.monotonic() - began >= 1.0
    timer.join()


def test_events_reach_all_who_listen_and_only_for_what_they_registered(fake):
    code = (
        HELLO
        + """
s = N.nvmlEventSetCreate()
for h in H[:2]:
    N.nvmlDeviceRegisterEvents(h, N.nvmlEventTypeXidCriticalError, s)
print("ready", flush=True)
got = []
while True:
    try:
        e = N.nvmlEventSetWait_v2(s, 20000 if len(got) < 3 else 0)
    except N.NVMLError as raised:
        got.append(raised.value)
        break
    got.append([N.nvmlDeviceGetIndex(e.device), e.eventData, e.gpuInstanceId])
print(json.dumps(got))
"""
    )
    fake.xid(0, 13)  # before anybody listened
    children = [
        subprocess.Popen([sys.executable, "-c", code], env=fake.environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    fake.xid(3, 31)
    fake.xid(1, 79)
    fake.xid(0, 94, gpu_instance=2)
    fake.xid(0, 48)
    for child in children:
        said, _ = child.communicate(timeout=30)
        assert json.loads(said) == [[1, 79, 0xFFFFFFFF], [0, 94, 2], [0, 48, 0xFFFFFFFF], 10]


def test_mig(fake):
    code = (
        HELLO
        + """
h = H[1]
out = {"mode": N.nvmlDeviceGetMigMode(h), "util": error(N.nvmlDeviceGetUtilizationRates, h), "parts": []}
for i in range(N.nvmlDeviceGetMaxMigDeviceCount(h)):
    try:
        m = N.nvmlDeviceGetMigDeviceHandleByIndex(h, i)
    except N.NVMLError_NotFound:
        continue
    a = N.nvmlDeviceGetAttributes_v2(m)
    out["parts"].append([N.nvmlDeviceGetUUID(m)[:12], N.nvmlDeviceGetGpuInstanceId(m), a.gpuInstanceSliceCount,
                         N.nvmlDeviceGetMemoryInfo(m).total, error(N.nvmlDeviceGetPowerUsage, m)])
print(json.dumps(out))
"""
    )
    fake.mig(1, (3, 4))
    said = nvml.tell(fake, code)
    assert (said["mode"], said["util"]) == ([1, 1], 3)
    assert said["parts"] == [
        ["MIG-00000001", 1, 3, 30 * layout.GIB, 3],
        ["MIG-00000002", 2, 4, 40 * layout.GIB, 3],
    ]
    fake.mig(1, ())
    assert nvml.tell(fake, code) == {"mode": [0, 0], "util": 0, "parts": []}


def test_processes_that_change_it_at_once_lose_nothing(fake):
    code = (
        "import sys; from pathlib import Path; from everstep.sim.nvml import FakeNvml\n"
        "f = FakeNvml.at(Path(sys.argv[1])); gpu = int(sys.argv[2])\n"
        "for i in range(20): f.set(gpu, temperature=i, power=i)\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(fake.folder), str(gpu)]) for gpu in range(3)]
    assert [child.wait(300) for child in children] == [0, 0, 0]
    assert [fake._read().records[gpu + 1].values["power"] for gpu in range(4)] == [19, 19, 19, 72_000]


def test_names_that_nobody_knows_are_refused(fake, tmp_path):
    with pytest.raises(ValueError, match="warmth is no reading"):
        fake.set(0, warmth=3)
    with pytest.raises(ValueError, match="nvmlNothing is neither a call nor a signal"):
        fake.fail("nvmlNothing")
    with pytest.raises(ValueError, match="gpus: 99 is not between 0 and 16"):
        FakeNvml(tmp_path / "other", 99)
    with pytest.raises(ValueError, match="holds no state"):
        FakeNvml.at(tmp_path / "nothing")


def test_missing_compiler_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    build.library.cache_clear()
    try:
        assert build.why_not() == (
            "there is no C compiler (no-such-compiler), which the stand-in for NVML needs; make test-setup installs one"
        )
    finally:
        build.library.cache_clear()


def test_signals_name_calls_that_are_there():
    assert {call for calls in layout.SIGNALS.values() for call in calls} <= set(layout.CALLS)
    assert {name for name, _, _ in layout.FIELDS.values()} <= set(layout.VALUES)
