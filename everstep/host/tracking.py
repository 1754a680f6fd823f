"""MLflow, told in the background: one MLflow run over all restarts, with the metrics of each step once.

MLflow is the index that people browse, never a condition of training. Everything that talks to it lives in one thread.
Metrics are read from `metrics.jsonl`, which is their spool; how far MLflow has them is asked of MLflow itself after every
start and every failure, so no step is logged twice. Tags, status and promotions are wishes: the latest of each is kept
until delivered, and rests in `tracking.json` of the run directory while MLflow is away.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

from everstep.core.checkpoint import Key
from everstep.core.promotion import Candidate, Promotion, Wish
from everstep.core.secrets import without_secrets
from everstep.host.mlflow_speaker import Hint, Speaker, Subject
from everstep.host.mourner import Mourner
from everstep.host.promoter import Gone, Promoter
from everstep.host.registry_turn import Busy
from everstep.host.runs import Run
from everstep.host.tail import Tail
from everstep.host.wishes import Wishes
from everstep.store import atomic

LOOK_SECONDS = 1.0
LONGEST_WAIT = 30.0
AWAY_SECONDS = 15.0
"""How long the end of a run waits for a promotion while MLflow does not answer. After that it is left to the next flow run."""
SLOW = 4.0
"""So many times as long as for its answer is waited for MLflow's import before it is asked."""
ARTIFACT_LIMIT = 4 << 20
"""Bytes of a file that MLflow is given: its servers stand behind gateways that refuse large requests."""
ENDS = {"completed": "FINISHED", "degraded": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Tracker:
    """Tells MLflow about one run. No method raises because of MLflow, and none waits for it without a deadline.

    `run_id` is MLflow's id of the run once it is known, `promotion` what became of the last `promote`. `notice(kind, text)`
    hears `tracking.away` and `tracking.back`, and with more data the kinds that begin with `promotion`.
    """

    def __init__(
        self,
        uri: str,
        subject: Subject,
        metrics: Path,
        notice: Callable[..., None] = lambda _kind, _text, **_: None,
        *,
        promoter: Promoter | None = None,
        mourner: Mourner | None = None,
        look_seconds: float = LOOK_SECONDS,
        longest_wait: float = LONGEST_WAIT,
    ) -> None:
        self.run_id: str | None = None
        self.promotion: Promotion | None = None
        self._speaker = Speaker(uri, subject, Tail(metrics))
        self._file = metrics.with_name("tracking.json")
        self._metrics = metrics
        self._patience = 0.0
        self._notice = notice
        self._promoter = promoter
        self._mourner = mourner
        self._trouble: Exception | None = None  # why the newest try to tell MLflow failed; None if it did not
        self._promotion_trouble: Exception | None = None
        self._promotion_failures = 0
        self._promote_again_at = 0.0
        self._look_seconds = look_seconds
        self._longest_wait = longest_wait
        self._changed = threading.Condition()
        self._wishes = Wishes.left_over(self._file)
        self._hint: Hint | None = None
        self._asked: float | None = None
        self._known = False
        self._closing = False
        self._over = False
        self._complete = False
        self._thread = threading.Thread(target=self._run, name="everstep-tracking", daemon=True)

    @classmethod
    def of(cls, run: Run, record: Callable[..., None]) -> Self:
        """The tracker of a run that this process owns; `record` takes the events."""
        facts = {
            "job": run.record.name,
            "fingerprint": run.record.fingerprint,
            "program": run.record.program,
            "dataset_fingerprint": run.record.dataset_fingerprint,
            "code_version": run.record.code_version,
        }
        subject = Subject(
            run.record.name,
            run.record.run,
            {f"everstep.{name}": value for name, value in facts.items()},
            {"config": run.record.config, "seed": run.record.seed},
            (run.places.persistent.absolute().parents[1] / ".mlartifacts" / run.record.name).as_uri(),
        )
        made = cls(
            run.job.tracking.uri,
            subject,
            run.places.metrics,
            lambda kind, text, **data: record(kind, text=text, **data),
            promoter=Promoter(run.places),
            mourner=Mourner(run),
        )
        if not run.job.release:
            made._wishes = made._wishes.with_no_release()
        return made

    def start(self, *, at_once: bool = True) -> None:
        """Begin to talk: the run is running now. Not `at_once` is after the first step: importing MLflow takes seconds
        of processor time that the start of a new run has better use for.
        """
        self._wish(status="RUNNING")
        self._patience = 0.0 if at_once else LONGEST_WAIT
        if self._mourner is not None:
            try:
                self._mourner.start()
            except OSError as error:
                self._notice("tracking.unwatched", f"MLflow will not hear if this flow is killed: {error}")
        self._thread.start()

    @property
    def owes_release(self) -> bool:
        """Whether a release that nothing but MLflow holds up is still to be told: `replay` does it."""
        wish = self._wishes.release
        return wish is not None and wish.release and not wish.unproven

    def wake(self) -> None:
        """Begin to talk about a run that has ended: nothing is said of its status."""
        if self._thread.ident is None:
            self._thread.start()

    def attempt(self, number: int, resumed_from: int) -> None:
        """An attempt begins."""
        self._wish({"everstep.attempts": str(number), "everstep.resumed_from": str(resumed_from)})

    def checkpoint(self, uri: str, step: int) -> None:
        """A newer checkpoint is durable."""
        self._wish({"everstep.checkpoint": uri, "everstep.checkpoint_step": str(step)})

    def object_tier(self, missing: str) -> None:
        """Whether the object tier has the newest checkpoint; `missing` names it if not."""
        self._wish({"everstep.object": f"missing {missing}" if missing else "complete"})

    def propose(self, one: Candidate | None) -> None:
        """A checkpoint is to be registered as candidate. Of several the newest counts."""
        if one is not None and self._promoter is not None:
            with self._changed:
                self._wishes = self._wishes.model_copy(update={"candidate": Wish(candidate=one)})

    def promote(self, wish: Wish, deadline_seconds: float) -> Promotion:
        """Register a checkpoint, and release it if that is wished; what became of it.

        `waiting` if MLflow was not told by the deadline, or did not answer for `AWAY_SECONDS`: it stays wished.
        """
        with self._changed:
            self.promotion = None
            self._wishes = self._wishes.model_copy(update={"candidate": None, "release": wish})
            self._promote_again_at = 0.0
            self._wait_while_it_answers(lambda: self.promotion is not None, deadline_seconds)
            trouble = self._trouble or self._promotion_trouble
            why = f"MLflow could not be told of it ({_in_words(trouble)})" if trouble else "MLflow is slow"
            return self.promotion or wish.ended("waiting", f"{why}; run the same command again to finish it.")

    def artifacts(self, names: Iterable[str]) -> None:
        """Small files of the run directory that MLflow is to show with the run; tried once when MLflow answers."""
        with self._changed:
            wanted = tuple(dict.fromkeys((*self._wishes.artifacts, *names)))
            self._wishes = self._wishes.model_copy(update={"artifacts": wanted})
            self._changed.notify_all()

    def finish(self, status: str, durable: Path | None) -> None:
        """The run is `completed`, `stopped` or `failed`, with its newest durable checkpoint."""
        key = Key.parse(durable.name) if durable else None
        if durable and key:
            self.checkpoint(durable.as_uri(), key.step)
        self._wish(status=ENDS[status])

    def hint(self, deadline_seconds: float) -> Hint | None:
        """What MLflow knew of this run when it was first asked; None when it knows nothing or does not answer in time.

        Its time begins when it is asked: on a busy machine its import alone takes longer. That is waited for, too, but
        not for ever.
        """
        latest = time.monotonic() + SLOW * deadline_seconds
        with self._changed:
            while not self._known:
                until = latest if self._asked is None else min(latest, self._asked + deadline_seconds)
                if (left := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            return self._hint

    def close(self, deadline_seconds: float) -> bool:
        """Whether MLflow has heard everything by the deadline. What it has not is replayed by the next tracker."""
        with self._changed:
            if self._over:
                return self._complete
            self._closing = True
            self._changed.notify_all()
            if self._thread.is_alive():
                self._changed.wait_for(lambda: self._complete, deadline_seconds)
            self._over = True
            self._changed.notify_all()
            if not self._complete:
                self._keep_wishes()
        if self._mourner is not None:
            self._mourner.dismiss()
        return self._complete

    def close_quickly(self) -> None:
        """Close without waiting for anybody, if nobody has closed yet."""
        self.close(0.0)

    def replay(self, deadline_seconds: float) -> bool:
        """Tell MLflow what an earlier flow run could not, and close. Nothing is done when nothing was left over.

        Waits until the deadline while MLflow answers, else for `AWAY_SECONDS`.
        """
        if self._file.exists() or self._thread.ident is not None:
            self.wake()
            with self._changed:
                self._closing = True
                self._changed.notify_all()
                self._wait_while_it_answers(lambda: self._complete, deadline_seconds)
        return self.close(0.0)

    def _wait_while_it_answers(self, true: Callable[[], bool], deadline_seconds: float) -> None:
        began = time.monotonic()
        while not true() and self._thread.is_alive() and not self._over:
            trouble = self._trouble or self._promotion_trouble
            away = trouble is not None and not isinstance(trouble, Busy)
            left = began + min(deadline_seconds, AWAY_SECONDS if away else deadline_seconds) - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(min(left, 0.5))

    def _wish(self, tags: Mapping[str, str] | None = None, status: str | None = None) -> None:
        with self._changed:
            merged = {**self._wishes.tags, **(tags or {})}
            self._wishes = self._wishes.model_copy(update={"tags": merged, "status": status or self._wishes.status})
            self._changed.notify_all()

    def _run(self) -> None:
        self._await_first_row()
        failures = 0
        while not self._over:
            try:
                self._tell()
            except Exception as error:  # noqa: BLE001 - the edge of the thread: whatever MLflow raises, training goes on
                failures += 1
                self._away(error, first=failures == 1)
                pause = self._longest_wait if not self._closing else 0.5
                self._sleep(random.uniform(0.5, 1.0) * min(pause, 0.25 * 2.0 ** min(failures, 12)))  # noqa: S311 - jitter
                continue
            if failures:
                self._notice("tracking.back", "MLflow answers again; what it missed has been told")
            failures = 0
            self._sleep(self._look_seconds)

    def _await_first_row(self) -> None:
        until = time.monotonic() + self._patience
        while time.monotonic() < until and not (self._closing or self._metrics.exists()):
            self._sleep(0.25)

    def _tell(self) -> None:
        """Everything that is known, to MLflow: metrics, tags, then the status."""
        closing = self._closing
        self._speaker.open()
        with self._changed:
            self._asked = self._asked or time.monotonic()
            self._changed.notify_all()
        found = self._speaker.attach()
        with self._changed:
            self.run_id = found
            if not self._known:
                self._hint, self._known = self._speaker.hint, True
            told = self._wishes
            self._changed.notify_all()
        self._hand_over(found, told.artifacts)
        self._speaker.tell(told.tags, told.status, lambda: self._over)
        self._trouble = None
        if self._mourner is not None:
            self._mourner.settle_others(self._speaker.client)
        self._fulfil(found)
        with self._changed:
            self._wishes = self._wishes.without(told)
            done = self._wishes == Wishes()
            if done and not self._over:
                self._file.unlink(missing_ok=True)
            self._complete = done and closing
            self._over = self._over or self._complete
            self._changed.notify_all()

    def _hand_over(self, run_id: str, names: Iterable[str]) -> None:
        """A store that refuses files is told of once, and holds up nothing else: the run directory has them."""
        for name in names:
            file = self._metrics.with_name(name)
            try:
                if (size := file.stat().st_size) > ARTIFACT_LIMIT:
                    self._notice(
                        "tracking.artifact", f"{file} stays there only: {size:,} bytes are too many for MLflow"
                    )
                    continue
                self._speaker.client.log_artifact(run_id, str(file))
            except Exception as error:  # noqa: BLE001 - the edge of the thread, as in _run
                self._notice("tracking.artifact", f"MLflow did not take {name}: {_in_words(error)}")
                return

    def _fulfil(self, run_id: str) -> None:
        """Promotions, the proposal first. Their failures hold up no metrics: they are tried again by a clock of their own."""
        if self._promoter is None or time.monotonic() < self._promote_again_at:
            return
        for name, wish in (("candidate", self._wishes.candidate), ("release", self._wishes.release)):
            if wish is None or self._over:
                continue
            try:
                done: Promotion | None = self._promoter.fulfil(self._speaker.client, run_id, wish)
            except Gone as error:
                done = wish.ended("refused", str(error)) if name == "release" else None
            except Exception as error:  # noqa: BLE001 - the edge of the thread, as in _run
                self._fulfil_later(error)
                return
            self._promotion_failures, self._promotion_trouble = 0, None
            self._fulfilled(name, wish, done)

    def _fulfilled(self, name: str, wish: Wish, done: Promotion | None) -> None:
        if done is not None:
            data = done.model_dump(mode="json", exclude={"status", "step", "reason"})
            kind = "released" if done.status == "production" else done.status
            self._notice(f"promotion.{kind}", done.reason, step=done.step, **data)
        with self._changed:
            if getattr(self._wishes, name) == wish:
                self._wishes = self._wishes.model_copy(update={name: None})
                self.promotion = done if name == "release" else self.promotion
            self._changed.notify_all()

    def _fulfil_later(self, error: Exception) -> None:
        self._promotion_failures += 1
        longest = self._longest_wait if not self._closing else 0.5
        pause = random.uniform(0.5, 1.0) * min(longest, 0.25 * 2.0 ** min(self._promotion_failures, 12))  # noqa: S311
        self._promote_again_at = time.monotonic() + pause
        self._promotion_trouble = error
        if self._promotion_failures == 1:
            self._notice("promotion.waiting", _in_words(error))

    def _away(self, error: Exception, *, first: bool) -> None:
        self._trouble = error
        self._speaker.forget()
        if first:
            self._notice("tracking.away", _in_words(error))
        with self._changed:
            if not self._over:
                self._keep_wishes()

    def _keep_wishes(self) -> None:
        """Tags and status outlive this process; metrics do anyway. No room on the disk costs only the wishes."""
        if self._wishes == Wishes():
            return
        try:
            atomic.write(self._file, self._wishes.to_json().encode(), sync=False)
        except OSError as error:
            self._notice("tracking.away", f"{self._file} cannot be written: {error}")

    def _sleep(self, seconds: float) -> None:
        """Until there is something to do: the pause is over, or somebody closes."""
        with self._changed:
            closing = self._closing
            self._changed.wait_for(lambda: self._over or self._closing != closing, seconds)


def _in_words(error: Exception | None) -> str:
    """The first line of an error, without a password that a URL in it may hold."""
    words = str(error).splitlines()
    return without_secrets(f"{type(error).__name__}: {words[0] if words else ''}")[:500]
