"""The registry under concurrency and kills: no alias is ever left wrong, and there is one version for each model."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.host import mlflow_run, registry, registry_turn

ROOT = Path(__file__).parents[2]
KILLS = (
    "promote.before_version",
    "promote.after_version",
    "promote.before_candidate",
    "promote.after_candidate",
    "promote.before_move",
    "promote.before_previous",
    "promote.before_production",
    "promote.after_production",
    "promote.before_done",
)
MOVES = KILLS[4:]


class Promoters:
    """Gives orders to `rigs/promoters.py`."""

    def __init__(self, folder: Path) -> None:
        self.plans = 0
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(ROOT / "tests/rigs/promoters.py")],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def __call__(self, *orders: dict) -> list:
        self.process.stdin.write(json.dumps(orders) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def plan(self, point: str, do: str = "kill") -> str:
        self.plans += 1
        path = self.folder / f"plan-{self.plans}.json"
        path.write_text(json.dumps([{"point": point, "do": do}]))
        return str(path)


@pytest.fixture(scope="module")
def promoters(tmp_path_factory) -> Iterator[Promoters]:
    made = Promoters(tmp_path_factory.mktemp("plans"))
    yield made
    made.process.stdin.close()
    made.process.wait(30)
    made.process.stdout.close()


class Shelf:
    """One job's model in a registry, with an MLflow run for each run of ours."""

    def __init__(self, uri: str, name: str) -> None:
        self.uri, self.name = uri, name
        self.client = mlflow_run.connect(uri)
        self.experiment = self.client.create_experiment(name)
        self.runs: dict[str, str] = {}

    def order(self, run: str, metric: float, step: int = 10, **more) -> dict:
        if run not in self.runs:
            self.runs[run] = self.client.create_run(self.experiment).info.run_id
        base = {"do": "promote", "uri": self.uri, "name": self.name, "number": None, "step": step, "metric": metric}
        return base | {"run_id": self.runs[run]} | more

    def aliases(self) -> dict[str, str]:
        return dict(registry.aliases(self.client, self.name))

    def versions(self) -> dict[str, str]:
        """Digest by number."""
        found = self.client.search_model_versions(f"name='{self.name}'")
        return {str(one.version): one.tags["everstep.digest"] for one in found}

    def loss(self, number: str) -> float:
        return json.loads(self.client.get_model_version(self.name, number).tags["everstep.metrics"])["loss"]

    def turns_left(self) -> list[str]:
        found = self.client.search_registered_models(f"name LIKE '{registry_turn.PREFIX}.{self.name}.%'")
        return [one.name for one in found]


@pytest.fixture
def shelf(uri) -> Shelf:
    return Shelf(uri, "job")


@pytest.fixture
def served(server, request) -> Shelf:
    """On a server, where only a lease keeps promotions apart."""
    return Shelf(f"http://127.0.0.1:{server[0]}", f"job-{abs(hash(request.node.name)) % 10**8}")


def test_a_release_keeps_the_former_one_and_a_rollback_brings_it_back(shelf, promoters):
    (first,) = promoters(shelf.order("a", 0.5))
    assert shelf.aliases() == {"candidate": first["version"], "production": first["version"]}
    (second,) = promoters(shelf.order("b", 0.4))
    assert shelf.aliases() == {
        "candidate": second["version"],
        "production": second["version"],
        "previous": first["version"],
    }
    done = registry.rollback("job", shelf.uri)
    assert (done.was, done.now) == (second["version"], first["version"])
    assert shelf.aliases() == {"candidate": second["version"], "production": first["version"]}
    with pytest.raises(ValueError, match="nothing to go back to"):
        registry.rollback("job", shelf.uri)
    tags = shelf.client.get_model_version("job", second["version"]).tags
    assert tags["everstep.rolled_back"].endswith("Z")


def test_a_worse_model_stays_candidate_with_a_sentence(shelf, promoters):
    (first,) = promoters(shelf.order("a", 0.5))
    (second,) = promoters(shelf.order("b", 0.6))
    assert second["refusal"] == (
        "step-00000010.a1 stays candidate: its loss of 0.6 is worse than the 0.5 of production (version 1)."
    )
    assert shelf.aliases() == {"candidate": second["version"], "production": first["version"]}


def test_the_same_weights_are_one_version_however_many_promote_them_at_once(shelf, promoters):
    """BC-175: four actors at once, one of them killed, and then a retry after a lost reply."""
    orders = [shelf.order("a", 0.5) for _ in range(4)]
    orders[3]["plan"] = promoters.plan("promote.after_version")
    answers = promoters(*orders)
    assert answers[3] == -signal.SIGKILL or isinstance(answers[3], dict)
    (again,) = promoters(shelf.order("a", 0.5))
    aliases = shelf.aliases()
    assert aliases == {"candidate": again["version"], "production": again["version"]}
    assert "digest" in shelf.versions()[aliases["production"]]
    alive = {one["version"] for one in answers if isinstance(one, dict) and "version" in one}
    assert alive == {again["version"]}, answers


@pytest.mark.sampled
@pytest.mark.parametrize("point", KILLS)
def test_what_a_kill_leaves_the_next_one_finishes(shelf, promoters, point):
    """The killed promotion, done again, ends as if nothing had happened; so does one of another run in between."""
    (first,) = promoters(shelf.order("a", 0.5))
    assert promoters(shelf.order("b", 0.4, plan=promoters.plan(point))) == [-signal.SIGKILL]
    assert shelf.aliases()["production"] in shelf.versions()
    (third,) = promoters(shelf.order("c", 0.3))
    assert not third["refusal"]
    begun = point in MOVES[1:]
    assert shelf.aliases()["production"] == third["version"]
    before = shelf.aliases()["previous"]
    assert shelf.loss(before) == (0.4 if begun else 0.5), "a move that was written down was finished first"
    (second,) = promoters(shelf.order("b", 0.4))
    assert "worse than the 0.3" in second["refusal"]
    assert sorted(shelf.versions().values()) == sorted({*shelf.versions().values()}), "one version for each model"
    assert len(shelf.versions()) == 3
    assert first["version"] in shelf.versions()


@pytest.mark.sampled
@pytest.mark.parametrize("point", MOVES)
def test_a_killed_rollback_is_finished_or_has_not_begun(shelf, promoters, point):
    promoters(shelf.order("a", 0.5))
    promoters(shelf.order("b", 0.4))
    order = {"do": "rollback", "uri": shelf.uri, "name": "job", "plan": promoters.plan(point)}
    assert promoters(order) == [-signal.SIGKILL]
    (answer,) = promoters({"do": "rollback", "uri": shelf.uri, "name": "job"})
    assert answer == "1" or "nothing to go back to" in answer["error"], "the first one's move was finished"
    assert shelf.aliases() == {"candidate": "2", "production": "1"}


def check_race(shelf, promoters, runs: int):
    losses = [0.5 - 0.01 * number for number in range(runs)]
    orders = [shelf.order(f"r{number}", loss) for number, loss in enumerate(losses)]
    answers = promoters(*orders)
    assert all("version" in one for one in answers), answers
    aliases = shelf.aliases()
    assert shelf.loss(aliases["production"]) == min(losses), "the best of all, in whatever order they came"
    released = [one for one in answers if not one["refusal"]]
    if len(released) > 1:
        assert shelf.loss(aliases["previous"]) > min(losses)
    assert aliases["candidate"] in shelf.versions()
    assert not shelf.turns_left()


def test_many_runs_at_once_on_a_database(shelf, promoters):
    check_race(shelf, promoters, 5)


def test_many_runs_at_once_on_a_server(served, promoters):
    check_race(served, promoters, 4)


def test_a_lease_of_a_dead_holder_is_taken_over_at_once_by_the_same_run_and_later_by_others(served, promoters):
    promoters(served.order("a", 0.5))
    killed = served.order("b", 0.4, plan=promoters.plan("promote.before_production"))
    assert promoters(killed) == [-signal.SIGKILL]
    assert len(served.turns_left()) == 1
    began = time.monotonic()
    with pytest.raises(registry_turn.Busy), registry_turn.taken(served.client, served.name, "other", 0.5):
        pass
    with registry_turn.taken(served.client, served.name, "other", 20, lease_seconds=1.0) as turn:
        assert time.monotonic() - began > 1.0
        turn.check()
        assert len(served.turns_left()) == 1
    assert not served.turns_left()

    killed["plan"] = promoters.plan("promote.before_production")
    assert promoters(killed) == [-signal.SIGKILL]
    began = time.monotonic()
    (again,) = promoters(served.order("b", 0.4))
    assert time.monotonic() - began < 30
    assert again["production"] == again["version"] == served.aliases()["production"]
    assert served.loss(served.aliases()["previous"]) == 0.5
    assert not served.turns_left()


def test_two_leases_are_never_held_at_once(served):
    """Threads that take turns with a lease that never expires: at each moment at most one holds it."""
    registry_turn_holders, worst, lock = [0], [0], threading.Lock()
    errors = []

    def work(number):
        client = mlflow_run.connect(served.uri)
        try:
            for _ in range(3):
                with registry_turn.taken(client, served.name, f"run{number}", 120):
                    with lock:
                        registry_turn_holders[0] += 1
                        worst[0] = max(worst[0], registry_turn_holders[0])
                    time.sleep(0.01)
                    with lock:
                        registry_turn_holders[0] -= 1
        except Exception as error:  # noqa: BLE001 - told by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(180)
    assert not errors
    assert worst == [1]
    assert not served.turns_left()


def test_a_holder_that_was_stopped_for_longer_than_its_lease_undoes_what_it_writes_late(served, promoters, monkeypatch):
    """It wakes just before it writes the alias; meanwhile another has taken its turn over and released a better one."""
    promoters(served.order("a", 0.5))
    stopped = served.order("b", 0.4, plan=promoters.plan("promote.before_production", "sleep:6"))
    answers: list = []
    slow = threading.Thread(target=lambda: answers.extend(promoters(stopped)))
    slow.start()
    deadline = time.monotonic() + 60
    while not served.turns_left() and time.monotonic() < deadline:
        time.sleep(0.05)
    monkeypatch.setattr(registry_turn, "LEASE_SECONDS", 1.0)
    client = mlflow_run.connect(served.uri)
    run_id = client.create_run(served.experiment).info.run_id
    tags = {"everstep.digest": "best", "everstep.step": "1", "everstep.metrics": '{"loss": 0.1}'}
    number = registry.register(client, served.name, run_id, "s3://bucket/best", tags)
    with registry_turn.taken(client, served.name, "fast", 30, lease_seconds=1.0) as turn:
        seen = registry._settled(client, served.name, turn)
        move = registry.Move(production=number, previous=seen.aliases["production"])
        registry._make(client, served.name, seen.ticket + 1, move, turn)
    slow.join(60)
    assert served.aliases()["production"] == number
    assert served.loss(served.aliases()["previous"]) == 0.4
    assert answers[0]["production"] == number, "and the late one says what really holds"


def test_a_person_who_moves_an_alias_by_hand_is_respected(shelf, promoters):
    for run, loss in (("a", 0.5), ("b", 0.4)):
        promoters(shelf.order(run, loss))
    shelf.client.set_registered_model_alias("job", "production", "1")
    (third,) = promoters(shelf.order("c", 0.45))
    assert not third["refusal"], "it is compared with what the person chose"
    assert shelf.aliases()["production"] == third["version"]
    assert shelf.aliases()["previous"] == "1"


def test_a_version_that_a_person_deleted_is_no_obstacle(shelf, promoters):
    promoters(shelf.order("a", 0.5))
    assert promoters(shelf.order("b", 0.4, plan=promoters.plan("promote.before_previous"))) == [-signal.SIGKILL]
    shelf.client.delete_model_version("job", "1")
    (third,) = promoters(shelf.order("c", 0.3))
    assert shelf.aliases()["production"] == third["version"]


def test_the_command_rolls_back(shelf, promoters, capsys):
    for run, loss in (("a", 0.5), ("b", 0.4)):
        promoters(shelf.order(run, loss))
    assert registry.main(["rollback", "job", "--tracking", shelf.uri]) == 0
    assert capsys.readouterr().out == "job: version 1 is in production again, in place of version 2.\n"
    assert registry.main(["rollback", "job", "--tracking", shelf.uri]) == 2
    assert registry.main(["rollback", "other", "--tracking", shelf.uri]) == 2
    assert "no registered model 'other'" in capsys.readouterr().err
    assert registry.main(["rollback", "job", "--tracking", "sqlite:////nowhere/mlflow.db"]) == 2
    assert not Path("/nowhere").exists()


def test_a_server_that_is_away_is_named_without_its_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(registry.StoreUnavailable) as caught:
        registry.rollback("job", "http://me:hidden@127.0.0.1:9")
    assert "hidden" not in str(caught.value)
    assert "try again" in str(caught.value)
