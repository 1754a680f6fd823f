"""What holds for all logs: nothing raises, unrelated lines may come in any order, a header changes the time only."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.core.logs import classify_log, sightings

DATA = Path(__file__).with_name("data")
ROWS = [json.loads(line) for name in ("log_lines", "more_lines") for line in (DATA / f"{name}.jsonl").read_text().splitlines()]  # fmt: skip
HARMLESS = [line for line in (DATA / "harmless_lines.txt").read_text().splitlines() if "The NVIDIA GPU" not in line]
SINGLE = [row["line"] for row in ROWS if "\n" not in row["line"]]
BARE = [line for line in SINGLE if line.startswith(("NVRM: ", "nvidia-nvswitch", "mlx5_core ", "EXT4-fs", "nvme ", "Out of memory", "INFO: task"))]  # fmt: skip
HEADERS = [
    "[ 1843.308145] ",
    "[ 1843.308145][   C12] ",
    "[Fri Apr  5 21:29:39 2024] ",
    "Apr  5 21:29:39 gpu-17 kernel: ",
    "Apr  5 21:29:39 gpu-17 kernel: [ 1843.308145] ",
    "2024-04-05T21:29:39.123456+0000 gpu-17 kernel: ",
    "2024-04-05T21:29:39Z gpu-17 kernel: ",
    "<3>Apr  5 21:29:39 gpu-17 kernel: ",
    "kern  :err   : [ 1843.308145] ",
    "3,4711,1843308145,-;",
    "Fri 2024-04-05 21:29:39 UTC gpu-17 kernel: ",
    "gpu-17: [ 1843.308145] ",
    "kernel: ",
    "    ",
    "> ",
]
GARBAGE = st.text(
    alphabet=st.sampled_from('NVRM: Xid(PCI0a1,79).\x1b[m{"MESSAGE\\u00\r\n\t<>|\x00\ud800é ncclWARN'), max_size=300
)


def facts(text):
    return {found.model_copy(update={"time": None}) for found in classify_log(text)}


@settings(deadline=None)
@given(st.one_of(st.text(), GARBAGE))
@example('{"MESSAGE":[300,1]}')
@example('{"MESSAGE":' + "[" * 5000)
@example('{"__REALTIME_TIMESTAMP":"' + "9" * 6000 + '","MESSAGE":"NVRM: Xid (PCI:0000:a1:00): 79, x"}')
@example('{"__REALTIME_TIMESTAMP":' + "9" * 6000 + ',"MESSAGE":"NVRM: Xid (PCI:0000:a1:00): 79, x"}')
@example('{"__REALTIME_TIMESTAMP":true,"MESSAGE":"NVRM: Xid (PCI:0000:a1:00): 79, x","time":7}')
@example('{"MESSAGE":null,"log":["a"],"_TRANSPORT":[],"SYSLOG_IDENTIFIER":{}, "x":"NVRM Xid"}')
@example("[9999999999.999999999] NVRM: Xid (PCI:0000:a1:00): 79, x")
@example("0000-00-00T99:99:99Z NVRM: Xid (PCI:0000:a1:00): 79, x")
@example("Feb 30 25:61:61 h kernel: NVRM: Xid (PCI:0000:a1:00): 79, x")
def test_nothing_raises(text):
    assert all(found.why and found.kind for found in classify_log(text))


@settings(deadline=None)
@given(st.data())
def test_a_known_line_torn_or_spoiled_never_raises(data):
    line = data.draw(st.sampled_from(SINGLE))
    at = data.draw(st.integers(0, len(line)))
    classify_log(line[:at] + data.draw(GARBAGE) + line[data.draw(st.integers(0, len(line))) :])


@settings(deadline=None)
@given(st.lists(st.sampled_from(SINGLE), max_size=30), st.lists(st.sampled_from(HARMLESS), max_size=10), st.randoms())
def test_order_does_not_matter(lines, harmless, rng):
    mixed = [*lines, *harmless]
    rng.shuffle(mixed)
    assert facts("\n".join(lines)) == facts("\n".join(mixed))


@settings(deadline=None)
@given(st.lists(st.floats(0, 100_000), max_size=60), st.randoms())
def test_bursts_do_not_depend_on_order(seconds, rng):
    lines = [f"[{one:.6f}] NVRM: Xid (PCI:0000:a1:00): 13, x" for one in seconds]
    expected = sorted((one.count for one in sightings("\n".join(lines))), reverse=True)
    rng.shuffle(lines)
    assert sorted((one.count for one in sightings("\n".join(lines))), reverse=True) == expected
    assert sum(expected) == len(lines)


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_changes_the_time_only(header):
    for line in BARE:
        assert facts(header + line) == facts(line), (header, line)


@pytest.mark.parametrize("header", HEADERS[:-2])
def test_carriage_returns_and_colours_change_nothing(header):
    for line in BARE:
        assert facts(f"\x1b[1;31m{header}\x1b[0m{line}\x1b[0m\r\n") == facts(line), line


@settings(deadline=None)
@given(st.integers(1, 20))
def test_repetition_is_counted_and_changes_nothing_else(times):
    for line in SINGLE[:40]:
        (seen,) = sightings("\n".join([line] * times))
        assert seen.count == times


HOSTILE = {
    "one line of openings": lambda size: "NVRM: Xid (PCI:" * (size // 15),
    "one line of words": lambda size: "NCCL WARN NET/IB : Got completion " * (size // 34),
    "no line at all": lambda size: "x" * size,
    "blanks": lambda size: " " * size,
    "headers": lambda size: "Aug 17 06:18:06 " * (size // 16),
    "escapes": lambda size: "\x1b[" * (size // 2),
    "open brackets": lambda size: "\n".join(['{"MESSAGE":' + "[" * 900] * (size // 911)),
    "returns": lambda size: "\r" * size,
    "candidates": lambda size: "\n".join(["nvrm xid nccl warn nvlink mlx5 cuda memory " * 20] * (size // 860)),
    "bytes": lambda size: "\n".join(['{"MESSAGE":[' + "78," * 900 + "78]}"] * (size // 2716)),
    "storm": lambda size: "\n".join(["NVRM: Xid (PCI:0000:a1:00): 31, pid=1, name=x, MMU Fault"] * (size // 57)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_time_is_linear_on_hostile_input(kind):
    """Eight times the text takes about eight times as long, not 64: the ratio is taken of the quickest of some tries."""

    def seconds(text):
        tries = []
        for _ in range(3):
            started = time.process_time()
            classify_log(text)
            tries.append(time.process_time() - started)
        return min(tries)

    small, large = seconds(HOSTILE[kind](30_000)), seconds(HOSTILE[kind](240_000))
    assert large < 24 * max(small, 0.002)


def test_binary_garbage_is_read_to_its_end():
    rng = random.Random(7)
    noise = bytes(rng.randrange(256) for _ in range(200_000)).decode("utf-8", "surrogateescape")
    text = f"{noise}\n[ 1.5] NVRM: Xid (PCI:0000:a1:00): 79, x\n{noise}"
    assert [found.xid for found in classify_log(text)] == [79]


def test_a_line_longer_than_a_chunk_hides_nothing_behind_it():
    text = f"{'y' * 3_000_000}\n[ 1.5] NVRM: Xid (PCI:0000:a1:00): 79, x"
    assert [found.xid for found in classify_log(text)] == [79]
