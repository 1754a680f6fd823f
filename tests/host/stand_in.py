"""Stands in for a rank: keeps the trainer's contract of files without torch, and misbehaves on request.

`spec.config` says how: {"step_seconds": s, "save_seconds": s, "start_seconds": s, "bad": {fault: {"rank": r, "step": n,
"attempt": a, ...}}}.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(value))
    beside.replace(path)


class Rank:
    def __init__(self, spec):
        self.spec, self.config = spec, spec["config"]
        self.rank, self.attempt, self.step = spec["rank"], spec["attempt"], spec["resumed_from"]
        self.run, self.local = Path(spec["run_dir"]), Path(spec["local_dir"])
        self.wish = False
        self.saved = self.step
        self.progress = 0
        signal.signal(signal.SIGTERM, self.hear)

    def hear(self, *_):
        self.wish = not self.bad("deaf")

    def bad(self, fault):
        want = self.config.get("bad", {}).get(fault)
        if (
            want is None
            or want.get("rank", self.rank) != self.rank
            or want.get("attempt", self.attempt) != self.attempt
        ):
            return None
        return want if self.step >= want.get("step", 0) else None

    def beat(self, phase):
        self.progress += 1
        seconds = self.config.get("step_seconds", 0.01)
        beat = {"attempt": self.attempt, "rank": self.rank, "pid": os.getpid(), "time": time.time(), "phase": phase,
                "step": self.step, "progress": self.progress, "saved_step": self.saved, "loss": 1.0,
                "step_seconds": seconds, "slowest_step_seconds": seconds}  # fmt: skip
        put(self.local / f"heartbeat-{self.rank}.json", beat)

    def lease(self):
        return json.loads((self.run / "lease.json").read_text())

    def save(self):
        self.beat("save")
        time.sleep(self.config.get("save_seconds", 0))
        self.saved = self.step
        self.folder = f"step-{self.step:08d}.a{self.attempt}"
        if self.rank == 0:
            put(self.local / "checkpoints" / self.folder / "manifest.json", {})

    def publish(self, segment):
        if self.rank == 0:
            result = {"attempt": self.attempt, "segment": segment, "step": self.step, "outcome": "done",
                      "checkpoint": self.folder, "time": time.time()}  # fmt: skip
            put(self.run / "segments" / f"{segment:06d}" / "result.json", result)

    def leave(self, outcome, **cause):
        end = {"attempt": self.attempt, "rank": self.rank, "outcome": outcome, "step": self.step,
               "saved_step": self.saved, "time": time.time(), "cause": cause}  # fmt: skip
        put(self.run / "attempts" / f"{self.attempt:06d}" / f"end-{self.rank}.json", end)
        if self.bad("linger"):
            time.sleep(600)
        sys.exit(1 if outcome == "failed" else 0)

    def misbehave(self):
        if self.bad("noise"):
            for stream in (1, 2):
                os.write(stream, b"x" * 5_000_000)
        if self.bad("grandchild") and self.config["bad"].pop("grandchild") and os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            os._exit(0)
        if self.bad("die"):
            os.kill(os.getpid(), self.bad("die").get("signal", signal.SIGKILL))
        if self.bad("exit"):
            os._exit(3)
        if self.bad("raise"):
            self.leave("failed", kind="exception", key="RuntimeError", message="a bug", step=self.step, rank=self.rank)
        while self.bad("hang"):
            time.sleep(0.05)

    def train(self):
        time.sleep(self.config.get("start_seconds", 0))
        while True:
            self.misbehave()
            lease = self.lease()
            segment = next((int(n) for n, end in lease["ends"].items() if end == self.step), 0)
            until = max(lease["ends"].values(), default=0)
            if (self.wish or lease["stop"]) and self.step < self.spec["steps"]:
                self.save()
                self.leave("stopped", kind="stop", message="asked to stop")
            if segment and self.saved != self.step:
                self.save()
                self.publish(segment)
            if self.step >= self.spec["steps"]:
                self.leave("done")
            if self.step < until:
                time.sleep(self.config.get("step_seconds", 0.01))
                self.step += 1
            else:
                time.sleep(0.01)
            self.beat("train" if self.step < until else "wait")


if __name__ == "__main__":
    line = sys.stdin.readline()
    if line:
        Rank(json.loads(line)).train()
