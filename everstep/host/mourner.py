"""Says to MLflow what a killed flow could not: that it has ended.

`python -m everstep.host.mourner`, started with the flow's tracker. The first line on its standard input says which run
it is about; a second line means that the flow says everything itself. The end of the input without one is the flow's
death: a run that MLflow still calls RUNNING then becomes FAILED, unless another flow run has taken it over. It is gone
`LIMIT_SECONDS` after the flow, whether MLflow answers or not.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.host import process
from everstep.host.process import Process

if TYPE_CHECKING:  # the process is to start in no time
    from everstep.host.runs import Run

LIMIT_SECONDS = 20
_FOR_MLFLOW = re.compile(
    r"(MLFLOW|DATABRICKS|AWS)_.*|(REQUESTS_CA_BUNDLE|SSL_CERT_FILE|NETRC)|(?i:https?_proxy|no_proxy)"
)


class Mourner:
    """What one flow has for its run: a process that outlives it, and a look at runs whose own one did not."""

    def __init__(self, run: "Run") -> None:
        self._job = run.record.name
        self._run = run.record.run
        self._uri = run.job.tracking.uri
        self._run_dir = run.places.persistent.absolute()
        self._process: Process | None = None
        self._others_settled = False

    def start(self) -> None:
        """Start the process. It bears no mark of the run: whoever sweeps that would end it before its hour."""
        names = [name for name in os.environ if _FOR_MLFLOW.fullmatch(name)]
        log = self._run_dir / "logs" / "mourner.log"
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [sys.executable, "-W", "ignore", "-m", "everstep.host.mourner"]
        mark = f"mourner/{self._run}"
        one = process.spawn(
            argv, process.child_environment(names, {}), mark, log, stdin=subprocess.PIPE, death_signal=0
        )
        about = {"uri": self._uri, "job": self._job, "run": self._run, "run_dir": str(self._run_dir)}
        process.tell(one, json.dumps(about | {"owner": os.getpid()}).encode() + b"\n")
        self._process = one

    def dismiss(self) -> None:
        """The flow says everything itself."""
        one, self._process = self._process, None
        if one is not None:
            process.tell(one, b"over\n")
            process.hang_up(one)
            one.wait(1.0)
            one.kill_group()
            one.wait(1.0)
            one.close()

    def settle_others(self, client: Any) -> None:
        """Earlier runs of this job whose flow was killed together with its mourner; once."""
        if not self._others_settled:
            home = self._run_dir.parent
            settle(
                client,
                self._job,
                lambda name: name != self._run and Path(name).name == name and is_dead(home / name),
            )
            self._others_settled = True


def settle(client: Any, job: str, dead: Callable[[str], bool]) -> None:
    """Runs of a job that MLflow calls RUNNING and that are `dead` become FAILED."""
    experiment = client.get_experiment_by_name(job)
    if experiment is None:
        return
    for found in client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'", max_results=100):
        name = found.data.tags.get("everstep.run", "")
        if name and dead(name):
            client.set_terminated(found.info.run_id, status="FAILED")


def is_dead(run_dir: Path) -> bool:
    """Whether the run's last owner was a process of this machine that is gone. Unknown is not dead."""
    try:
        owner = json.loads((run_dir / "owner.json").read_bytes())
        return bool(owner["host"] == socket.gethostname()) and not _lives(int(owner["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _lives(pid: int) -> bool:
    """Whether there is such a process, other than a dead one that its parent has not looked after."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = sys.stdin.readline()
    if not line or sys.stdin.readline():
        return 0
    signal.alarm(LIMIT_SECONDS)
    about = json.loads(line)
    run_dir = Path(about["run_dir"])

    def dead(name: str) -> bool:
        return name == about["run"] and _owner(run_dir) == about["owner"] and is_dead(run_dir)

    from everstep.host import mlflow_run

    settle(mlflow_run.connect(about["uri"]), about["job"], dead)
    return 0


def _owner(run_dir: Path) -> int:
    try:
        return int(json.loads((run_dir / "owner.json").read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
