"""Ranks without a flow above them: a small driver that leases, starts ranks as real processes, and reads what they left.

The programs they train are those in `tests/trainer`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from everstep.core.checkpoint import Key
from everstep.core.segment import AttemptSpec, Lease, RankEnd, SegmentResult
from everstep.store import atomic, jsonl
from everstep.store.layout import RunPlaces
from everstep.trainer.reading import load_checkpoint

HERE = Path(__file__).parents[1] / "trainer"
SEGMENT = 20
STEPS = 60


@dataclass
class Gang:
    """The processes of one attempt."""

    driver: "Driver"
    attempt: int
    pids: list[int]
    statuses: dict[int, int] = field(default_factory=dict)

    def wait(self, seconds=30.0):
        """Exit codes by rank (negative: signal)."""
        until = time.monotonic() + seconds
        while not self.dead() or len(self.statuses) < len(self.pids):
            if time.monotonic() > until:
                self.kill()
                raise AssertionError(f"still alive: {self.pids}; {self.logs()}")
            time.sleep(0.005)
        return [self.statuses[rank] for rank in range(len(self.pids))]

    def dead(self):
        """Whether a rank has ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses and (code := self.driver.zygote.ask({"reap": pid})) is not None:
                self.statuses[rank] = code
        return bool(self.statuses)

    def failed(self):
        """Whether a rank ended by itself otherwise than in order."""
        return self.dead() and any(code > 0 for code in self.statuses.values())

    def kill(self, number=signal.SIGKILL):
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                os.kill(pid, number)

    def end(self, rank=0):
        path = self.driver.places.end(self.attempt, rank)
        return RankEnd.parse(path.read_bytes(), "end", "end") if path.exists() else None

    def logs(self):
        return "\n".join(self.driver.log(self.attempt, rank).read_text()[-3000:] for rank in range(len(self.pids)))


class Zygote:
    def __init__(self):
        environment = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONPATH": str(HERE.parents[1])},
            text=True,
        )

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


class Driver:
    """One run in `folder`: starts attempts of it, grants leases, reads what is there."""

    def __init__(self, zygote, folder, **config):
        self.zygote = zygote
        self.folder = folder
        self.places = RunPlaces(persistent=folder / "run", local=folder / "local")
        for one in (folder / "journal", folder / "logs", self.places.persistent, self.places.local):
            one.mkdir(parents=True)
        self.config = {"journal": str(folder / "journal")} | config
        self.gangs = []

    def log(self, attempt, rank):
        return self.folder / "logs" / f"{attempt}-{rank}.log"

    def lease(self, attempt, *ends, stop=False, saves=0):
        numbered = {end // SEGMENT + (1 if end % SEGMENT else 0): end for end in ends}
        lease = Lease(attempt=attempt, ends=numbered, stop=stop, saves=saves)
        atomic.write(self.places.lease, lease.to_json().encode(), sync=False)

    def spec(self, attempt, restore=None, ranks=1, **more):
        key = Key.parse(restore) if restore else None
        values = {
            "name": "tiny",
            "run": "r1",
            "attempt": attempt,
            "rank": 0,
            "world_size": ranks,
            "local_rank": 0,
            "program": f"{HERE / 'tiny.py'}:build",
            "search_path": str(self.folder),
            "config": self.config,
            "data": str(self.folder),
            "steps": STEPS,
            "seed": 7,
            "threads": 1,
            "save_every_steps": 10,
            "restore": str(self.places.checkpoint("local", key)) if key else None,
            "resumed_from": key.step if key else 0,
            "run_dir": str(self.places.persistent),
            "local_dir": str(self.places.local),
            "parent_pid": self.zygote.process.pid,
        }
        return AttemptSpec(**(values | more))

    def start(self, attempt=1, restore=None, ranks=1, faults=None, lease=(20, 40, 60), largest=None, **more):
        """`largest`: how many bytes of tensors a file may have, if not as many as always."""
        if lease:
            self.lease(attempt, *lease)
        spec = self.spec(attempt, restore, ranks, **more)
        specs = [spec.model_copy(update={"rank": rank, "local_rank": rank}) for rank in range(ranks)]
        plan = None
        if faults:
            plan = self.folder / f"faults-{attempt}.json"
            plan.write_text(json.dumps(faults))
        request = {
            "specs": [one.model_dump(mode="json") for one in specs],
            "logs": [str(self.log(attempt, rank)) for rank in range(ranks)],
            "faults": str(plan) if plan else None,
            "largest": largest,
        }
        gang = Gang(self, attempt, self.zygote.ask(request))
        self.gangs.append(gang)
        return gang

    def run(self, *args, **more):
        gang = self.start(*args, **more)
        gang.wait()
        return gang

    def committed(self):
        folders = self.places.checkpoints("local")
        return sorted(path.parent.name for path in folders.glob("*/manifest.json"))

    def weights(self, folder):
        return load_checkpoint(self.places.checkpoints("local") / folder)

    def rows(self, attempts):
        """Accepted metrics rows by step: those of the last attempt that got past a step. `attempts`: (number, from)."""
        found = {}
        for attempt, start in attempts:
            found = {step: row for step, row in found.items() if step <= start}
            for row in jsonl.read(self.places.metrics):
                if row["attempt"] == attempt:
                    found[row["step"]] = {key: row[key] for key in row if key not in ("attempt", "time")}
        return found

    def parts(self, rank):
        """The journal rows of a rank, for each process that wrote any."""
        parts = []
        for row in jsonl.read(self.folder / "journal" / f"{rank}.jsonl"):
            if "start" in row:
                parts.append([])
            else:
                parts[-1].append(row)
        return parts

    def journal(self, rank, starts):
        """Accepted journal rows of a rank: `starts` has the step from which each process began."""
        accepted = []
        for start, part in zip(starts, self.parts(rank), strict=True):
            accepted = [row for row in accepted if row["step"] <= start] + part
        return accepted

    def fired(self, attempt):
        """Whether the first fault of an attempt has happened."""
        return (self.folder / f"faults-{attempt}.json.0.fired").exists()

    def held(self, attempt, committed):
        """Wait until the first fault of an attempt holds it, and `committed` is committed."""
        self.until(lambda: self.fired(attempt) and self.has(committed))

    def has(self, step):
        return step == 0 or any(folder.startswith(f"step-{step:08d}.") for folder in self.committed())

    def result(self, segment):
        return SegmentResult.parse(self.places.result(segment).read_bytes(), "segments", "result.json")

    def heartbeat(self, rank=0):
        return json.loads(self.places.heartbeat(rank).read_text())

    def until(self, condition, seconds=60.0):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.gangs[-1].logs()
            assert not self.gangs[-1].failed() or condition(), self.gangs[-1].logs()
            time.sleep(0.005)

    def phase(self, phase, rank=0):
        self.until(lambda: self.places.heartbeat(rank).exists() and self.heartbeat(rank)["phase"] == phase)

    def step(self, step):
        self.until(lambda: self.places.heartbeat(0).exists() and self.heartbeat()["step"] >= step)
