"""The registered models of MLflow: versions, their aliases, a release, and the way back.

`python -m everstep.host.registry rollback NAME --tracking URI` puts back what was in production before.

A change of the aliases `production` and `previous` is a *move*. It is written down as a tag of the registered model
before the first alias changes and marked done after the last, so whoever takes the next turn finishes what a killed
process began. Any call may raise whatever MLflow raises.
"""

import argparse
import json
import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.core.errors import EverstepError, StoreUnavailable
from everstep.core.promotion import CANDIDATE, PREVIOUS, PRODUCTION, Version
from everstep.core.record import Record
from everstep.core.secrets import without_secrets
from everstep.host import mlflow_run, registry_turn
from everstep.host.registry_turn import Turn, code
from everstep.store import faults

PATIENCE_SECONDS = 10.0
ROLLBACK_PATIENCE = 90.0
MOVES_KEPT = 4
TRIES = 3
_MOVE = "everstep.move."
_URI = "everstep.uri"


class Move(Record):
    """What the two aliases are to be. `previous` None: there is none. `taken_over`: another process finished it."""

    production: str
    previous: str | None = None
    rolled_back: str | None = None
    done: bool = False
    taken_over: bool = False


@dataclass(frozen=True)
class Released:
    """What a release came to. `refusal` is a sentence, empty if the version is in production."""

    production: str | None
    previous: str | None
    refusal: str = ""


@dataclass(frozen=True)
class RolledBack:
    """Versions of a registered model before and after a rollback."""

    name: str
    was: str
    now: str


@dataclass(frozen=True)
class _Seen:
    """A registered model as it was read: its aliases, and the moves by their tickets."""

    aliases: Mapping[str, str]
    moves: Mapping[int, Move]

    @property
    def ticket(self) -> int:
        return max(self.moves, default=0)


def register(client: Any, name: str, run_id: str, source: str, tags: Mapping[str, str]) -> str:
    """The number of the version of these weights from this MLflow run; made if there is none, and one only."""
    known = _same(client, name, run_id, tags)
    if not known:
        _ensure(client, name)
        faults.point("promote.before_version")
        made = _despite_others(
            lambda: client.create_model_version(name, source, run_id=run_id, tags=dict(tags), await_creation_for=0)
        )
        faults.point("promote.after_version")
        known = _same(client, name, run_id, tags) or [str(made.version)]
        if str(made.version) != known[0]:  # somebody registered the same at the same time: the first one counts
            client.delete_model_version(name, str(made.version))
    elif version(client, name, known[0]).tags.get(_URI) != tags.get(_URI):  # it stands on a more durable tier by now
        client.set_model_version_tag(name, known[0], _URI, tags[_URI])
    return known[0]


def point_candidate(client: Any, name: str, number: str) -> None:
    """Give a version the alias `candidate`. The last to say so is right: no turn is needed."""
    faults.point("promote.before_candidate")
    if _look(client, name).aliases.get(CANDIDATE) != number:
        _despite_others(lambda: client.set_registered_model_alias(name, CANDIDATE, number))
    faults.point("promote.after_candidate")


def release(
    client: Any,
    name: str,
    number: str,
    refusal: Callable[[Version | None], str],
    holder: str,
    patience: float = PATIENCE_SECONDS,
) -> Released:
    """Put a version into production, unless `refusal`, asked about what is there now, gives a sentence.

    What was there becomes `previous`. `holder` is as in `registry_turn.taken`. Raises Busy.
    """
    with registry_turn.taken(client, name, holder, patience) as turn:
        seen = _settled(client, name, turn)
        now = seen.aliases.get(PRODUCTION)
        if now == number:
            return Released(now, seen.aliases.get(PREVIOUS))
        why = refusal(version(client, name, now) if now else None)
        if why:
            return Released(now, seen.aliases.get(PREVIOUS), why)
        move = Move(production=number, previous=now or seen.aliases.get(PREVIOUS))
        _make(client, name, seen.ticket + 1, move, turn)
    ends = _confirmed(client, name, seen.ticket + 1).aliases
    held = ends.get(PRODUCTION)
    late = "" if held == number else f"version {held} took its place at the same moment."
    return Released(held, ends.get(PREVIOUS), late)


def rollback(name: str, tracking_uri: str) -> RolledBack:
    """Put the version with the alias `previous` of the model `name` back into production.

    What was in production loses its alias and is marked `everstep.rolled_back`: no run of Everstep releases it again.
    Raises ValueError when there is nothing to go back to, StoreUnavailable when MLflow does not answer.
    """
    file = mlflow_run.sqlite_file(tracking_uri)
    if file is not None and not file.exists():
        raise ValueError(f"tracking_uri: there is no file {file}; name the MLflow database that the job names.")
    try:
        return _roll_back(mlflow_run.connect(tracking_uri), name)
    except (ValueError, EverstepError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, this is what it means
        first = (str(error).splitlines() or [""])[0]
        text = f"MLflow at {tracking_uri} did not do it ({first[:200]}); try again."
        raise StoreUnavailable(without_secrets(text)) from None  # the cause would repeat a password


def _roll_back(client: Any, name: str) -> RolledBack:
    try:
        _look(client, name)
    except Exception as error:
        if code(error) == "RESOURCE_DOES_NOT_EXIST":
            raise ValueError(f"name: MLflow has no registered model {name!r}; it has the job's name.") from error
        raise
    with registry_turn.taken(client, name, f"rollback-{secrets.token_hex(4)}", ROLLBACK_PATIENCE) as turn:
        seen = _settled(client, name, turn)
        now, before = seen.aliases.get(PRODUCTION), seen.aliases.get(PREVIOUS)
        if not before or before == now:
            raise ValueError(
                f"name: {name!r} has no version with the alias previous, so there is nothing to go back to."
            )
        _make(client, name, seen.ticket + 1, Move(production=before, rolled_back=now), turn)
    _confirmed(client, name, seen.ticket + 1)
    return RolledBack(name, now or "", before)


def version(client: Any, name: str, number: str) -> Version:
    return Version(number=number, tags=dict(client.get_model_version(name, number).tags))


def versions_of(client: Any, name: str, run_id: str) -> list[Version]:
    """The versions that one MLflow run brought, oldest first."""
    found = client.search_model_versions(f"name='{name}' and run_id='{run_id}'", max_results=1000)
    return sorted(
        (Version(number=str(one.version), tags=dict(one.tags)) for one in found), key=lambda one: int(one.number)
    )


def aliases(client: Any, name: str) -> Mapping[str, str]:
    """Each alias with the number of its version."""
    return _look(client, name).aliases


def withdraw(client: Any, name: str, one: Version, reason: str) -> None:
    """A version whose checkpoint turned out bad: it says so, and is no candidate."""
    client.set_model_version_tag(name, one.number, "everstep.quarantined", reason[:500])
    if _look(client, name).aliases.get(CANDIDATE) == one.number:
        client.delete_registered_model_alias(name, CANDIDATE)


def _same(client: Any, name: str, run_id: str, tags: Mapping[str, str]) -> list[str]:
    """The versions of the same weights at the same step of the same run, oldest first."""
    same = ("everstep.digest", "everstep.step")
    wanted = [tags.get(key) for key in same]
    return [one.number for one in versions_of(client, name, run_id) if [one.tags.get(key) for key in same] == wanted]


def _ensure(client: Any, name: str) -> None:
    try:
        client.create_registered_model(name)
    except Exception as error:
        if code(error) != "RESOURCE_ALREADY_EXISTS":
            raise


def _look(client: Any, name: str) -> _Seen:
    model = client.get_registered_model(name)
    moves = {
        int(key.removeprefix(_MOVE)): Move.model_validate_json(text)
        for key, text in model.tags.items()
        if key.startswith(_MOVE)
    }
    return _Seen({alias: str(number) for alias, number in model.aliases.items()}, moves)


def _settled(client: Any, name: str, turn: Turn) -> _Seen:
    """The model after what an earlier holder of the turn left half done has been finished."""
    seen = _look(client, name)
    last = seen.moves.get(seen.ticket)
    if last is None:
        return seen
    late = any(
        move.taken_over and move.production == seen.aliases.get(PRODUCTION)
        for ticket, move in seen.moves.items()
        if ticket < seen.ticket
    )
    if last.done and not (late and seen.aliases.get(PRODUCTION) != last.production):
        return seen
    turn.check()
    taken_over = last.taken_over or not last.done
    _apply(client, name, last)
    faults.point("promote.before_done")
    _note(client, name, seen.ticket, last.model_copy(update={"done": True, "taken_over": taken_over}))
    return _look(client, name)


def _make(client: Any, name: str, ticket: int, move: Move, turn: Turn) -> None:
    """Carry out a move: written down first, marked done last."""
    faults.point("promote.before_move")
    turn.check()
    _note(client, name, ticket, move)
    faults.point("promote.before_previous")
    turn.check()
    _apply(client, name, move)
    faults.point("promote.before_done")
    _note(client, name, ticket, move.model_copy(update={"done": True}))
    for old in _look(client, name).moves:
        if old <= ticket - MOVES_KEPT:
            client.delete_registered_model_tag(name, f"{_MOVE}{old:09d}")


def _apply(client: Any, name: str, move: Move) -> None:
    """Set the aliases of a move. Done twice it changes nothing; a version that a person deleted meanwhile is left out."""
    if move.rolled_back:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        _if_there(lambda: client.set_model_version_tag(name, move.rolled_back, "everstep.rolled_back", moment))
    if move.previous:
        _if_there(lambda: client.set_registered_model_alias(name, PREVIOUS, move.previous))
    faults.point("promote.before_production")
    _if_there(lambda: client.set_registered_model_alias(name, PRODUCTION, move.production))
    faults.point("promote.after_production")
    if not move.previous and PREVIOUS in _look(client, name).aliases:
        client.delete_registered_model_alias(name, PREVIOUS)


def _confirmed(client: Any, name: str, ticket: int) -> _Seen:
    """The model as it is now. Had we been held up for longer than a lease, another's newer move holds, not our late one."""
    seen = _look(client, name)
    settled = ticket
    while seen.ticket > settled:
        settled = seen.ticket
        _apply(client, name, seen.moves[settled])
        seen = _look(client, name)
    return seen


def _despite_others(do: Callable[[], Any]) -> Any:
    """MLflow inserts rows without asking first: of two who do so at the same moment one is refused, and may ask again."""
    for _ in range(TRIES):
        try:
            return do()
        except Exception as error:
            if "UNIQUE constraint" not in str(error) and "duplicate key" not in str(error):
                raise
            time.sleep(random.uniform(0.05, 0.2))  # noqa: S311 - jitter
    return do()


def _note(client: Any, name: str, ticket: int, move: Move) -> None:
    client.set_registered_model_tag(name, f"{_MOVE}{ticket:09d}", json.dumps(move.model_dump(mode="json")))


def _if_there(do: Callable[[], object]) -> None:
    try:
        do()
    except Exception as error:
        if code(error) not in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"):
            raise


def main(arguments: list[str]) -> int:
    """The command line; returns its exit code: 0, 2 for what the user must mend, 1 for the world."""
    parser = argparse.ArgumentParser(prog="python -m everstep.host.registry")
    rolling = parser.add_subparsers(required=True).add_parser("rollback", help="put the previous version back")
    rolling.add_argument("name", help="the job's name")
    rolling.add_argument("--tracking", required=True, metavar="URI", help="MLflow's tracking URI, as in the job")
    given = parser.parse_args(arguments)
    try:
        done = rollback(given.name, given.tracking)
    except (ValueError, EverstepError) as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, ValueError) else 1
    sys.stdout.write(f"{done.name}: version {done.now} is in production again, in place of version {done.was}.\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
