"""The command line of the train flow: what is printed, what is left in the log, and the exit code.

A wrong job is answered before Prefect is imported; the embedded server starts while the rest is. Heavy imports stand
inside functions, so that a signal in the first moments already finds its handler.
"""

import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from logging.handlers import MemoryHandler

    from everstep.core.job import TrainJob
    from everstep.core.monitor import MonitorJob
    from everstep.core.scrub import ScrubJob

COMPLETED, FAILED, USER, STOPPED = 0, 1, 2, 75
USAGE = {
    "flows.train": "usage: python -m flows.train job.yaml [--take-over]",
    "flows.stage": "usage: python -m flows.stage job.yaml",
}
EXIT_SECONDS = 10.0
"""How long Prefect's threads may try to bring out their last logs and events; they would try for ever."""


@dataclass
class Console:
    """A checked job, on its way to the flow. `asked` are the signals that came while Python imported the rest."""

    job: "TrainJob | ScrubJob | MonitorJob"
    take_over: bool
    asked: Sequence[int] = ()

    def run(self, train: Callable[..., Any]) -> int:
        """Run the flow, print the JSON line last, and return the exit code."""
        from everstep.host import server

        log = _quiet_libraries()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _interrupt)
        sentence, code = None, FAILED
        try:
            if self.asked:
                raise KeyboardInterrupt
            train(self.job, take_over=self.take_over)
        except BaseException as error:  # the edge of the process: recorded, and said by the exit code
            logging.getLogger("everstep").exception("the flow ended by an exception")
            sentence, code = _judge(error, self.job)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        server.stop_ahead()
        gc.freeze()  # half a second of tidying up at exit that nobody needs
        code = _close(log, sentence, code)
        _leave_within(EXIT_SECONDS, code)
        return code


def open_console(arguments: Sequence[str], module: str = "flows.train") -> Console:
    """Read and check the job named on the command line of `module`, and begin to start the server that it needs.

    Leaves with exit code 2 and one sentence for what a person can mend.
    """

    def read() -> "tuple[TrainJob, bool]":
        from everstep.host import jobs

        file, take_over = _parse(arguments, module)
        job = jobs.read(file)
        jobs.check(job, Path.cwd())
        return job, take_over

    return _open(read)


def open_scrub(arguments: Sequence[str]) -> Console:
    """As `open_console`, for `flows.scrub`: what is to be scrubbed is a job's file or a folder."""

    def read() -> "tuple[ScrubJob, bool]":
        from everstep.host import scrubbing

        return scrubbing.asked(arguments), False

    return _open(read)


def open_monitor(arguments: Sequence[str]) -> Console:
    """As `open_console`, for `flows.monitor`: what is to be watched is a file, options, or both."""

    def read() -> "tuple[MonitorJob, bool]":
        from everstep.host import monitoring

        return monitoring.asked(arguments, "python -m flows.monitor"), False

    return _open(read)


def _open(read: "Callable[[], tuple[TrainJob | ScrubJob | MonitorJob, bool]]") -> Console:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    os.environ.setdefault("DO_NOT_TRACK", "1")  # Prefect would print a notice, and tell others, at its first import
    from everstep.host import server

    _leave_working_directory()
    try:
        job, take_over = read()
        if not _has_api():
            server.start_ahead(server.default_log())
    except (ValueError, OSError) as error:
        _refuse(_sentence(error))
    prepared = _has_api() or server.is_prepared()
    _say(f"{job.name}: starting" + ("" if prepared else " (the first start on a machine takes some seconds more)"))
    return Console(job, take_over, asked)


def _leave_working_directory() -> None:
    """Python looks for modules in the working directory first. A user's own `tasks` there is not ours.

    The program's modules are found by the ranks, which are told where to look. A checkout of ours stays.
    """
    here = Path.cwd()
    if here != Path(__file__).parents[2]:
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve()]


def _leave_within(seconds: float, code: int) -> None:
    """All is said and written: leave by then, whatever still holds the interpreter."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def _parse(arguments: Sequence[str], module: str) -> tuple[Path, bool]:
    files = [argument for argument in arguments if argument != "--take-over"]
    if len(files) != 1 or files[0].startswith("-"):
        _refuse(USAGE[module])
    return Path(files[0]), "--take-over" in arguments


def _interrupt(number: int, frame: object) -> NoReturn:
    """Prefect has its own handler while a flow runs, and calls this one after it: unwind, do not die."""
    raise KeyboardInterrupt


def _refuse(sentence: str) -> NoReturn:
    _say(sentence)
    raise SystemExit(USER)


def _say(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()


def _sentence(error: BaseException, place: str = "") -> str:
    """The error's own words on one line. An operating system's error also says where, and what to do."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, OSError) or error.strerror is None:
        return text
    what = ": ".join(part for part in (str(error.filename or place), error.strerror) if part)
    return f"{what}; mend that and run the same command to go on. Nothing committed is lost."


def _judge(error: BaseException, job: "TrainJob | ScrubJob | MonitorJob") -> tuple[str, int]:
    """What is said of an exception that ended the flow, and the exit code if the run itself gave none."""
    from everstep.core.errors import EverstepError
    from everstep.host import outcome

    if type(error).__name__ in ("TerminationSignal", "KeyboardInterrupt", "CancelledRun"):
        return "Stopped on request.", STOPPED if _has_committed(job) else FAILED
    if isinstance(error, ValueError):
        return _sentence(error), USER
    if isinstance(error, EverstepError | OSError):
        return _sentence(error, (outcome.delivered() or {}).get("run_dir", "")), FAILED
    text = f"The flow ended by {type(error).__name__}: {_sentence(error)[:300]}."
    return f"{text} Nothing committed is lost; run the same command to go on.", FAILED


def _has_committed(job: "TrainJob | ScrubJob | MonitorJob") -> bool:
    """Whether the job's newest run has a checkpoint to go on from. Scrubs and monitors always go on from where they were."""
    from everstep.core.errors import Damaged
    from everstep.core.job import TrainJob
    from everstep.host import runs

    if not isinstance(job, TrainJob):
        return True
    try:
        known = runs.runs(Path(job.tiers.persistent) / job.name)
    except (OSError, Damaged):
        return False
    tiers = (job.tiers.local, job.tiers.persistent)
    return bool(known) and any(
        next(Path(tier, job.name, known[-1].run).glob("checkpoints/*/manifest.json"), None) for tier in tiers
    )


def _close(log: "MemoryHandler", sentence: str | None, code: int) -> int:
    """Print what is left to say; the run's own JSON line decides the exit code when there is one."""
    from everstep.host import outcome

    final = outcome.delivered()
    file = _keep_log(log, final)
    if final is not None:
        code = _code(final, code)
    if sentence and (final is None or final["status"] != "stopped"):
        known = code != FAILED or not sentence.startswith("The flow ended by")
        _say(sentence if known or file is None else f"{sentence} The log is {file}.")
    if final is not None:
        sys.stdout.write(json.dumps(final) + "\n")
        sys.stdout.flush()
    return code


def _code(final: dict[str, Any], code: int) -> int:
    if final["status"] == "completed":
        return COMPLETED
    if final["status"] == "stopped":
        return STOPPED if final["step"] else FAILED
    return code


def _keep_log(log: "MemoryHandler", final: dict[str, Any] | None) -> Path | None:
    """Write what the libraries logged to the run's directory, or beside the server's log if there is no run."""
    from everstep.host import server

    run_dir = (final or {}).get("run_dir")
    file = Path(run_dir, "logs", "flow.log") if run_dir else server.default_log().with_name("flow.log")
    try:
        target = logging.FileHandler(file, mode="a" if run_dir else "w")
    except OSError:  # a full or read-only disk is what we are about to tell of
        return None
    target.setFormatter(log.formatter)
    log.setTarget(target)
    log.flush()
    return file


def _quiet_libraries() -> "MemoryHandler":
    """Keep the console for our own lines: what Prefect and the libraries log goes to the run directory."""
    from logging.handlers import MemoryHandler

    keep = MemoryHandler(capacity=100_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    keep.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    known = logging.root.manager.loggerDict.values()
    for one in (logging.root, *(logger for logger in known if isinstance(logger, logging.Logger))):
        printing = [handler for handler in one.handlers if isinstance(handler, logging.StreamHandler)]
        for handler in printing:
            one.removeHandler(handler)
        if printing and one is not logging.root:
            one.addHandler(keep)
    logging.root.addHandler(keep)
    logging.captureWarnings(capture=True)
    logging.raiseExceptions = False
    return keep


def _has_api() -> bool:
    """Whether Prefect's settings name an API, seen without importing Prefect."""
    import tomllib

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
