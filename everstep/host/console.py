"""The command line of the train flow: what is printed, what is left in the log, and the exit code.

A wrong job is answered before Prefect is imported; the embedded server starts while the rest is.
"""

import json
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from everstep.core.errors import EverstepError
from everstep.core.job import TrainJob
from everstep.host import jobs, outcome, server

COMPLETED, FAILED, USER, STOPPED = 0, 1, 2, 75


@dataclass
class Console:
    """A checked job, and the server that is starting for it (None when Prefect has an API already)."""

    job: TrainJob
    take_over: bool
    server: server.Server | None

    def run(self, train: Callable[..., Any]) -> int:
        """Run the flow, print the JSON line last, and return the exit code."""
        log = _quiet_libraries()
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            if self.server is not None:
                self.server.wait_ready(90)
            train(self.job, take_over=self.take_over)
        except (ValueError, EverstepError) as error:
            return _close(log, _sentence(error), USER if isinstance(error, ValueError) else FAILED)
        except BaseException as error:  # the edge of the process: recorded, and said by the exit code
            logging.getLogger("everstep").exception("the flow ended by an exception")
            return _close(log, _interruption(error), FAILED)
        finally:
            if self.server is not None:
                self.server.stop()
        return _close(log, None, FAILED)


def open_console(arguments: Sequence[str]) -> Console:
    """Read and check the job named on the command line, and begin to start the server that it needs.

    Leaves with exit code 2 and one sentence for what a person can mend.
    """
    take_over = "--take-over" in arguments
    files = [argument for argument in arguments if argument != "--take-over"]
    if len(files) != 1 or files[0].startswith("-"):
        _refuse("usage: python -m flows.train job.yaml [--take-over]")
    try:
        job = jobs.read(Path(files[0]))
        jobs.check(job, Path.cwd())
    except ValueError as error:
        _refuse(_sentence(error))
    if _has_api():
        return Console(job, take_over, None)
    own = server.start(server.default_log())
    os.environ["PREFECT_API_URL"] = own.url
    os.environ["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] = "false"
    os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = "false"  # the server goes with the flow: nobody could read them
    return Console(job, take_over, own)


def _interrupt(number: int, frame: object) -> NoReturn:
    """Prefect has its own handler while a flow runs, and calls this one after it: unwind, do not die."""
    raise KeyboardInterrupt


def _refuse(sentence: str) -> NoReturn:
    sys.stderr.write(sentence + "\n")
    raise SystemExit(USER)


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _interruption(error: BaseException) -> str:
    name = type(error).__name__
    if name in ("TerminationSignal", "KeyboardInterrupt"):
        return "Stopped by a signal."
    detail = _sentence(error)
    return f"The flow ended by {name}: {detail[:300]}. Nothing committed is lost; run the same command to go on."


def _close(log: "logging.handlers.MemoryHandler", sentence: str | None, code: int) -> int:
    """Print what is left to say; the run's own JSON line decides the exit code when there is one."""
    final = outcome.delivered()
    if final is not None:
        target = logging.FileHandler(Path(final["run_dir"]) / "logs" / "flow.log")
        target.setFormatter(log.formatter)
        log.setTarget(target)
        log.flush()
        code = _code(final, code)
    if sentence and code != COMPLETED:
        sys.stderr.write(sentence + "\n")
    if final is not None:
        sys.stdout.write(json.dumps(final) + "\n")
        sys.stdout.flush()
    return code


def _code(final: dict[str, Any], code: int) -> int:
    if final["status"] == "completed":
        return COMPLETED
    if final["status"] == "stopped":
        return STOPPED if final["checkpoint"] else FAILED
    return code


def _quiet_libraries() -> "logging.handlers.MemoryHandler":
    """Keep the console for our own lines: what Prefect and the libraries log goes to the run directory."""
    from logging.handlers import MemoryHandler

    keep = MemoryHandler(capacity=100_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    keep.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    for one in loggers:
        printing = [handler for handler in one.handlers if isinstance(handler, logging.StreamHandler)]
        for handler in printing:
            one.removeHandler(handler)
        if printing and one is not logging.root:
            one.addHandler(keep)
    logging.root.addHandler(keep)
    logging.captureWarnings(capture=True)
    return keep


def _has_api() -> bool:
    """Whether Prefect's settings name an API, seen without importing Prefect."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    try:
        content = tomllib.loads(profiles.read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return False
    active = os.environ.get("PREFECT_PROFILE") or content.get("active", "")
    profile = content.get("profiles", {}).get(active, {})
    return bool(isinstance(profile, dict) and profile.get("PREFECT_API_URL"))
