"""Taking turns at the aliases of a registered model: MLflow cannot change one only if it is still what it was.

With a SQLite file: a file lock beside it, which the kernel lets go of when its holder dies. With a server: a lease. Its
object is a registered model `everstep-turn.<job>.<generation>`, as the names of registered models are the one thing that
MLflow lets exactly one of all create. The highest generation holds the turn; nobody compares clocks: whoever has seen the
same lease for `LEASE_SECONDS` by its own clock takes the next generation. `docs/decisions/0005-promotion.md` argues it.
"""

import fcntl
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from everstep.core.errors import EverstepError
from everstep.host import mlflow_run

LEASE_SECONDS = 60.0
HOLD_SECONDS = 20.0
"""A holder begins nothing more after this: what it has begun lands long before anybody may take over."""
LOOK_SECONDS = 0.25
PREFIX = "everstep-turn"


class Busy(EverstepError):
    """Another promotion of this model is under way, or died less than a minute ago; ask again later."""


@dataclass(frozen=True)
class Turn:
    """A turn that is held. `check` raises Busy when it may have been lost."""

    check: Callable[[], None]


@contextmanager
def taken(client: Any, name: str, holder: str, patience: float, lease_seconds: float = LEASE_SECONDS) -> Iterator[Turn]:
    """Hold the turn at the aliases of the model `name`. Raises Busy when it is not free within `patience` seconds.

    `holder` names who asks: what an earlier process of the same holder left is taken over at once, so a holder must
    never be two living processes.
    """
    file = mlflow_run.sqlite_file(client.tracking_uri)
    if file is not None:
        handle = _locked(os.fspath(file.with_name(f".{file.name}.{name}.turn")), name, patience)
        try:
            yield Turn(_always)
        finally:
            os.close(handle)
        return
    lease = _Lease(client, name, holder, lease_seconds)
    lease.take(patience)
    try:
        yield Turn(lease.check)
    finally:
        lease.give_back()


def _always() -> None:
    """A file lock is not lost while its holder lives."""


def _locked(path: str, name: str, patience: float) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(handle)
                raise _busy(name) from None
            time.sleep(0.02)


class _Lease:
    """One generation of the lease while it is asked for and held. A token tells it from all others."""

    def __init__(self, client: Any, name: str, holder: str, seconds: float) -> None:
        self._client = client
        self._name = name
        self._holder = holder
        self._seconds = seconds
        self._token = f"{holder}/{secrets.token_hex(8)}"
        self._generation = 0
        self._since = 0.0

    def take(self, patience: float) -> None:
        until = time.monotonic() + patience
        seen, seen_since = (0, ""), time.monotonic()
        while True:
            top = max(self._held(), default=(0, ""))
            if top != seen:
                seen, seen_since = top, time.monotonic()
            free = top == (0, "") or top[1].startswith(f"{self._holder}/")
            expired = time.monotonic() - seen_since >= self._seconds
            if (free or expired) and self._won(top):
                return
            if time.monotonic() >= until:
                raise _busy(self._name)
            time.sleep(LOOK_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - jitter

    def check(self) -> None:
        if time.monotonic() - self._since > HOLD_SECONDS or max(self._held(), default=(0, ""))[1] != self._token:
            raise Busy(f"The turn at the aliases of {self._name} was lost to another promotion; it is tried again.")

    def give_back(self) -> None:
        self._delete(self._generation)

    def _won(self, before: tuple[int, str]) -> bool:
        """Create the next generation; whether it is the highest, and `before` is still what it was."""
        self._generation, self._since = before[0] + 1, time.monotonic()
        try:
            self._client.create_registered_model(
                f"{PREFIX}.{self._name}.{self._generation:09d}",
                tags={"everstep.token": self._token},
                description="Held for seconds while aliases change. One that stays was left by a process that died.",
            )
        except Exception as error:
            if code(error) == "RESOURCE_ALREADY_EXISTS":
                return False
            raise
        held = self._held()
        others = [one for one in held if one[1] != self._token]
        if max(held)[1] != self._token or max(others, default=(0, "")) not in (before, (0, "")):
            self._delete(self._generation)
            return False
        for generation, _ in others:
            self._delete(generation)
        return True

    def _held(self) -> list[tuple[int, str]]:
        prefix = f"{PREFIX}.{self._name}."
        found = self._client.search_registered_models(f"name LIKE '{prefix}%'", max_results=100)
        names = [(one.name.removeprefix(prefix), one.tags.get("everstep.token", "")) for one in found]
        return [(int(number), token) for number, token in names if number.isdecimal()]

    def _delete(self, generation: int) -> None:
        try:
            self._client.delete_registered_model(f"{PREFIX}.{self._name}.{generation:09d}")
        except Exception as error:
            if code(error) != "RESOURCE_DOES_NOT_EXIST":
                raise


def code(error: Exception) -> str:
    """MLflow's own word for an error; empty for an error of another kind."""
    return str(getattr(error, "error_code", ""))


def _busy(name: str) -> Busy:
    return Busy(f"Another promotion of {name} is under way, or died less than a minute ago; try again later.")
