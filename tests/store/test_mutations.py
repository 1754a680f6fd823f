"""A mutation matrix: whatever is done to any file of a checkpoint, every reader refuses it and names the file.

The checkpoints are those of real training: one rank, two ranks, tied weights, several shards a rank. The readers are
`verify_checkpoint`, the copiers, the restore in the child, `load_checkpoint`, and the object tier, as a directory and as
S3. `make test` samples the places in each file, `make test-all` takes every byte of the small ones.
"""

import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rigs.ranks import Driver, Zygote

from everstep.core.checkpoint import MANIFEST, AttemptClaim, Key, State
from everstep.core.errors import Damaged
from everstep.host import resume
from everstep.host.copier import Copier, CopierSpec
from everstep.store import checkpoint, digest, marks, object_tier
from everstep.store.layout import RunPlaces
from everstep.store.objects import NotThere
from everstep.store.tensors import weights_digest, weights_digest_of
from everstep.trainer import locate, restore, structure
from everstep.trainer.evaluation import Probe
from everstep.trainer.order import Order
from everstep.trainer.reading import load_checkpoint
from everstep.trainer.vitals import Vitals

ALL = "EVERSTEP_ALL" in os.environ
PROGRAMS = Path(__file__).parents[1] / "trainer"
LAST, BEFORE, LATER = "step-00000020.a1", "step-00000010.a1", "step-00000020.a2"
JOB, RUN, OTHER = "tiny", "r001-0123abcd", "r002-0123abcd"
SMALL = 6000  # bytes; of a smaller file every byte is flipped, once each
FEW = 2


@dataclass(frozen=True)
class Shape:
    """How a checkpoint is made: by which program, on how many ranks, with how many bytes of tensors in a file at most."""

    name: str
    ranks: int = 1
    largest: int | None = None
    program: str = "rich"

    @property
    def entry(self) -> str:
        return f"{PROGRAMS / self.program}.py:build"


SHAPES = (Shape("one"), Shape("two", 2), Shape("shards", 2, 1500), Shape("sharded", 2, program="sharded"))
"""The first three with tied weights and every kind of buffer; the last one cut over its ranks by `fully_shard`."""


@dataclass(frozen=True)
class Trained:
    """Two runs of one shape: `places` has steps 10 and 20 of attempt 1, step 20 of attempt 2; `other` is another run."""

    shape: Shape
    driver: Driver
    places: RunPlaces
    other: RunPlaces

    def folder(self, name: str = LAST) -> Path:
        return self.places.checkpoints("local") / name


@dataclass(frozen=True)
class Mutation:
    """Harm to a folder: `names` are the files of which one is to be blamed."""

    name: str
    hurt: Callable[[Path], object]
    names: frozenset[str]
    on_objects: bool = True
    """Whether an object store can come to look like that."""


# --- the checkpoints, made once by real training


@pytest.fixture(scope="module")
def zygote():
    one = Zygote()
    yield one
    one.close()


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def trained(request, zygote, tmp_path_factory):
    return train(zygote, request.param, tmp_path_factory.mktemp(request.param.name))


def train(zygote, shape, folder):
    runs = []
    for run, seed in ((RUN, 7), (OTHER, 8)):
        driver = Driver(zygote, folder / run)
        driver.places = RunPlaces.of(str(folder / "nvme"), str(folder / "persistent"), str(folder / "object"), JOB, run)
        for tier in ("local", "persistent"):
            driver.places.tiers[tier].mkdir(parents=True)
        for attempt, start in ((1, None), (2, BEFORE)) if run == RUN else ((1, None),):
            gang = driver.start(
                attempt, start, shape.ranks, lease=(20,), largest=shape.largest,
                steps=20, program=shape.entry, run=run, seed=seed,
            )  # fmt: skip
            assert gang.wait() == [0] * shape.ranks, gang.logs()
            claim = AttemptClaim(
                attempt=attempt, resumed_from=10 if start else 0, host="here", pid=1, boot="b", time=1.0
            )
            driver.places.claim(attempt).parent.mkdir(exist_ok=True)
            driver.places.claim(attempt).write_text(claim.to_json())
        (driver.places.persistent / "run.json").write_text("{}")
        (driver.places.local / "run.json").write_text("{}")  # so that a reader knows whose checkpoints stand there
        shutil.copy(driver.places.structure, driver.places.local)
        runs.append(driver)
    made = Trained(shape, runs[0], runs[0].places, runs[1].places)
    names = {path.name for path in made.folder().iterdir()}
    several = shape.largest is not None or shape.program == "sharded"  # what is whole is apart from what is cut
    assert ("rank-0-1.safetensors" in names) == several, names
    assert f"rank-{shape.ranks - 1}.json" in names
    return made


# --- what is done to them


def write(path: Path, data: bytes) -> None:
    """A new file: the old one is a link to what was trained."""
    if path.is_symlink() or path.exists():
        path.unlink()
    path.write_bytes(data)


def mutations(trained: Trained, dice: random.Random) -> list[Mutation]:
    folder = trained.folder()
    found: list[Mutation] = []
    for path in sorted(folder.iterdir()):
        found += of_file(trained, path, dice)
    return found + of_folder(trained) + of_manifest(trained) + of_entries(trained) + of_members(trained)


def of_file(trained: Trained, path: Path, dice: random.Random) -> list[Mutation]:
    """What may happen to any file."""
    name, good = path.name, path.read_bytes()
    found: list[Mutation] = []

    def put(kind: str, data: bytes, *more: str) -> None:
        if data != good:
            found.append(Mutation(f"{name}: {kind}", lambda f: write(f / name, data), frozenset({name, *more})))

    def do(kind: str, hurt: Callable[[Path], object], *, on_objects: bool = False) -> None:
        found.append(Mutation(f"{name}: {kind}", hurt, frozenset({name}), on_objects))

    for at in places_in(good, dice):
        put(f"bit flip at {at}", good[:at] + bytes([good[at] ^ (1 << dice.randrange(8))]) + good[at + 1 :])
    for length in {0, 1, 7, 8, len(good) // 2, len(good) - 1} | {dice.randrange(len(good)) for _ in range(FEW)}:
        put(f"cut to {length} bytes", good[:length])
        put(f"zeros from {length} on", good[:length] + bytes(len(good) - length))
    at = dice.randrange(len(good))
    put("a hole", good[:at] + bytes(min(512, len(good) - at)) + good[at + 512 :])
    put("a byte more", good + b"\n")
    put("a page of zeros more", good + bytes(4096))
    for source, whose in (
        (trained.folder(BEFORE), "another step's"),
        (trained.folder(LATER), "a later attempt's"),
        (trained.other.checkpoints("local") / LAST, "another run's"),
    ):
        put(whose, (source / name).read_bytes())
    for other in sorted(path.parent.iterdir()):
        if other.name > name and other.read_bytes() != good and (ALL or dice.random() < 0.4):
            pair = frozenset({name, other.name})
            found.append(Mutation(f"{name}: swapped with {other.name}", swap(name, other.name), pair))
            put(f"a copy of {other.name}", other.read_bytes())
    do("missing", lambda f: (f / name).unlink(), on_objects=True)
    do("a folder in its place", lambda f: ((f / name).unlink(), (f / name).mkdir()))
    do("a pipe in its place", lambda f: ((f / name).unlink(), os.mkfifo(f / name)))
    do("a link to the very bytes", lambda f: ((f / name).unlink(), (f / name).symlink_to(path)))
    do("a link to nothing", lambda f: ((f / name).unlink(), (f / name).symlink_to("nothing")))
    return found


def places_in(data: bytes, dice: random.Random) -> list[int]:
    """Offsets to flip: in header and in data; every one of a small file if all is asked for."""
    if ALL and len(data) <= SMALL:
        return list(range(len(data)))
    head = min(len(data), 8 + int.from_bytes(data[:8], "little")) if data[:1] not in (b"{", b"") else len(data)
    spots = {0, 7, 8, head - 1, min(head, len(data) - 1), len(data) - 1}
    many = 400 if ALL else FEW
    return sorted(
        spots | {dice.randrange(head) for _ in range(many)} | {dice.randrange(len(data)) for _ in range(many)}
    )


def swap(one: str, other: str) -> Callable[[Path], object]:
    def hurt(folder: Path) -> None:
        first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
        write(folder / one, second)
        write(folder / other, first)

    return hurt


def of_folder(trained: Trained) -> list[Mutation]:
    """Files too many, and whole folders that are another checkpoint's."""

    def become(source: Path) -> Callable[[Path], object]:
        def hurt(folder: Path) -> None:
            shutil.rmtree(folder)
            shutil.copytree(source, folder)

        return hurt

    extra = {
        "notes.txt": lambda f: (f / "notes.txt").write_text("x"),
        "rank-9.safetensors": lambda f: shutil.copy(f / "rank-0.json", f / "rank-9.safetensors"),
        ".rank-0.json.0a1b2c3d.tmp": lambda f: (f / ".rank-0.json.0a1b2c3d.tmp").write_text(""),
        "folder": lambda f: (f / "folder").mkdir(),
        "link": lambda f: (f / "link").symlink_to("rank-0.json"),
        "pipe": lambda f: os.mkfifo(f / "pipe"),
    }
    plain = ("notes.txt", "rank-9.safetensors")
    whole = {
        "another step": trained.folder(BEFORE),
        "a later attempt": trained.folder(LATER),
        "another run": trained.other.checkpoints("local") / LAST,
    }
    return [Mutation(f"extra: {name}", hurt, frozenset({name}), name in plain) for name, hurt in extra.items()] + [
        Mutation(f"the folder of {kind}", become(source), frozenset({MANIFEST})) for kind, source in whole.items()
    ]


def sealed(fields: dict) -> bytes:
    """A manifest with a seal that fits, as somebody makes it who knows how."""
    kept = {name: value for name, value in fields.items() if name != "seal"}
    seal = hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return json.dumps(kept | {"seal": seal}, indent=1).encode() + b"\n"


class Forger:
    """Makes edited manifests. With its old seal a manifest is to blame, with a new one so is what it tells lies about."""

    def __init__(self, trained: Trained) -> None:
        self.text = (trained.folder() / MANIFEST).read_text()
        self.fields = json.loads(self.text)
        self.made: list[Mutation] = []

    def put(self, kind: str, data: bytes, *names: str) -> None:
        to_blame = frozenset(names or {MANIFEST})
        self.made.append(Mutation(f"manifest: {kind}", lambda folder: write(folder / MANIFEST, data), to_blame))

    def edit(self, kind: str, changed: dict, *names: str) -> None:
        self.put(f"{kind}, old seal", json.dumps(self.fields | changed, indent=1).encode() + b"\n")
        self.put(f"{kind}, new seal", sealed(self.fields | changed), *names)

    def without(self, word: str) -> dict:
        return {name: value for name, value in self.fields.items() if name != word}


def of_manifest(trained: Trained) -> list[Mutation]:
    """A manifest that was edited."""
    forger = Forger(trained)
    edit, put = forger.edit, forger.put
    ranks = [f"rank-{rank}.json" for rank in range(trained.shape.ranks + 1)]
    for word, value in (("step", 10), ("step", 21), ("attempt", 2), ("run", OTHER), ("job", "another")):
        edit(f"{word} {value}", {word: value})
    for word, value in (("world_size", trained.shape.ranks + 1), ("samples", 17)):
        edit(f"{word} {value}", {word: value}, MANIFEST, *ranks)
    if trained.shape.ranks > 1:
        edit("world_size 1", {"world_size": 1}, MANIFEST, *ranks)
    for word, value in (("world_size", 0), ("step", -1), ("samples", "many"), ("time", None), ("files", {})):
        edit(f"{word} {value}", {word: value})
    for word, value in (("metrics", {"score": 0.0}), ("time", 3.0), ("code_version", "x"), ("parent_step", 7)):
        put(f"{word} {value}, old seal", json.dumps(forger.fields | {word: value}, indent=1).encode() + b"\n")
    edit("a later schema", {"schema_version": 2})
    edit("a later schema with news", {"schema_version": 2, "news": [1]})
    edit("a field too many", {"news": 1})
    for word in ("job", "step", "files"):
        put(f"without {word}", sealed(forger.without(word)))
    put("without a seal", json.dumps(forger.without("seal")).encode() + b"\n")
    put("no object", b"[]\n")
    for twice in ('"step": 99,\n "step": 20', '"step": 20,\n "step": 20'):
        put(f"{twice!r}", forger.text.replace('"step": 20', twice).encode())
        put(f"{twice!r}, new seal", sealed(forger.fields).replace(b'"step": 20', twice.encode()))
    put("a path twice in an entry", forger.text.replace('"path":', '"path": "x", "path":', 1).encode())
    return forger.made


def of_entries(trained: Trained) -> list[Mutation]:
    """A manifest in which an entry was edited, left out, or added."""
    forger = Forger(trained)
    files = forger.fields["files"]
    for index, entry in enumerate(files):
        name = entry["path"]

        def others(*changed: dict, index: int = index) -> dict:
            return {"files": [*files[:index], *changed, *files[index + 1 :]]}

        forger.edit(f"size of {name}", others(entry | {"size": entry["size"] + 1}), name)
        forger.edit(f"digest of {name}", others(entry | {"blake3": "0" * 64}), name)
        forger.edit(f"no {name}", others(), name)
        forger.edit(f"{name} twice", others(entry, entry))
        forger.edit(f"an entry after {name}", others(entry, entry | {"path": "invented.json"}), "invented.json")
        for path in (f"../{LAST}/{name}", f"/etc/{name}", f"sub/{name}", f"./{name}", "", MANIFEST, f"{name}\0"):
            forger.edit(f"{name} as {path!r}", others(entry | {"path": path}))
    return forger.made


def of_members(trained: Trained) -> list[Mutation]:
    """A file of JSON that was edited, and the manifest with it: every digest is right, and what it says is wrong."""
    found = []

    def edit(name: str, kind: str, change: Callable[[dict], object]) -> None:
        document = json.loads((trained.folder() / name).read_bytes())
        change(document)
        put(name, kind, json.dumps(document).encode())

    def put(name: str, kind: str, data: bytes, *names: str) -> None:
        def hurt(folder: Path) -> None:
            fields = json.loads((folder / MANIFEST).read_bytes())
            for entry in fields["files"]:
                if entry["path"] == name:
                    entry |= {"size": len(data), "blake3": digest.of_bytes(data)}
            write(folder / name, data)
            write(folder / MANIFEST, sealed(fields))

        found.append(Mutation(f"{name}, forged: {kind}", hurt, frozenset({name, *names})))

    for rank in range(trained.shape.ranks):
        name = f"rank-{rank}.json"
        text = (trained.folder() / name).read_text()
        put(name, "a name twice", text.replace('"rank":', f'"rank":{rank},"rank":', 1).encode())
        put(name, "no object", b"[]")
        put(name, "no JSON", text[:-1].encode())
        put(name, "not a number", text.replace('"epoch":', '"epoch":NaN,"e":', 1).encode())
        edit(name, "another rank", lambda one: one.update(rank=5))
        edit(name, "another world", lambda one: one.update(world_size=9))
        edit(name, "a later schema", lambda one: one.update(schema_version=2))
        edit(name, "another step", lambda one: one["progress"].update(step=19))
        edit(name, "fewer samples", lambda one: one["progress"].update(samples=1))
        edit(name, "a negative epoch", lambda one: one["progress"].update(epoch=-1))
        edit(name, "no position", lambda one: one.pop("progress"))
        edit(name, "no state", lambda one: one.pop("tree"))
        edit(name, "a tensor that no file holds", lambda one: one["tree"]["rng"].update(more={"$tensor": "rng/more"}))
        edit(name, "a tie to nothing", lambda one: one["aliases"].update({"model/x": "model/nothing"}))
    return found


# --- the readers


@dataclass
class Bench:
    """A working copy of a run: its last checkpoint is linked from what was trained, before each mutation anew."""

    trained: Trained
    places: RunPlaces

    @classmethod
    def at(cls, folder: Path, trained: Trained) -> "Bench":
        places = RunPlaces.of(str(folder / "nvme"), str(folder / "persistent"), str(folder / "object"), JOB, RUN)
        for tier in ("local", "persistent"):
            places.tiers[tier].mkdir(parents=True)
            shutil.copy(trained.places.structure, places.tiers[tier])
            (places.tiers[tier] / "run.json").write_text("{}")
        shutil.copytree(trained.places.claim(1).parent, places.claim(1).parent)
        places.claim(2).unlink()
        return cls(trained, places)

    def put(self, tier: str = "local", name: str = LAST) -> Path:
        folder = self.places.checkpoints(tier) / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in self.trained.folder(name).iterdir():
            os.link(path, folder / path.name)
        return folder

    def forget(self) -> None:
        shutil.rmtree(self.places.persistent / "marks", ignore_errors=True)
        shutil.rmtree(self.places.checkpoints("persistent"), ignore_errors=True)

    def copier(self) -> Copier:
        spec = CopierSpec(
            name=JOB,
            run=RUN,
            run_dir=str(self.places.persistent),
            local_dir=str(self.places.local),
            parent_pid=os.getpid(),
        )
        return Copier(spec)


@pytest.fixture
def bench(trained, tmp_path):
    return Bench.at(tmp_path, trained)


def failing(
    trained: Trained,
    bench: Bench,
    read: Callable[[Path], str],
    share: int = 1,
    counts: Callable[[Mutation], bool] = lambda _: True,
) -> list[str]:
    """The mutations for which a reader does not name a right file; `read` gives the one that it names, or nothing.

    Of a `share` above one, every so manieth mutation is tried, unless all is asked for.
    """
    wrong = []
    chosen = [one for one in mutations(trained, random.Random(trained.shape.name)) if counts(one)]
    for one in chosen[:: 1 if ALL else share]:
        folder = bench.put()
        one.hurt(folder)
        named = read(folder)
        if named not in one.names:
            wrong.append(f"{one.name}: {named or 'not refused'}")
    return wrong


def refused(read: Callable[[Path], object]) -> Callable[[Path], str]:
    """The file that a reader names when it raises Damaged."""

    def name(folder: Path) -> str:
        try:
            read(folder)
        except Damaged as error:
            return error.path if str(error).startswith(f"{LAST}: {error.path} ") else str(error)
        return ""

    return name


def test_there_is_much_that_may_happen(trained):
    assert len(mutations(trained, random.Random(1))) > 200


@pytest.mark.sampled
def test_verify_checkpoint_refuses_each_and_names_the_file(trained, bench):
    def read(folder: Path) -> str:
        result = checkpoint.verify_checkpoint(folder)
        assert result.ok == (not result.why)
        return result.file if result.why.startswith(f"{LAST}: {result.file} ") else result.why

    assert failing(trained, bench, read) == []
    for name in (BEFORE, LAST):
        result = checkpoint.verify_checkpoint(bench.put(name=name))
        assert (result.why, result.ok) == ("", True)


def test_load_checkpoint_refuses_each_and_names_the_file(trained, bench):
    assert failing(trained, bench, refused(load_checkpoint), 2) == []
    folder = bench.put()
    assert weights_digest(load_checkpoint(folder)) == weights_digest_of(folder)


class Child:
    """The restore of a child, without its process: every rank's, as far as it goes without the others."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.device = torch.device("cpu")
        sys.modules.pop("tiny", None)  # the drills have another one
        self.programs = [
            locate.build(trained.shape.entry, str(PROGRAMS), {"shard": "none"}, trained.places.local)
            for _ in range(trained.shape.ranks)
        ]

    def restore(self, folder: Path) -> None:
        for rank in range(self.trained.shape.ranks):
            self._restore(folder, rank)

    def _restore(self, folder: Path, rank: int) -> None:
        ranks = self.trained.shape.ranks
        spec = self.trained.driver.spec(3, LAST, ranks, run=RUN, rank=rank, steps=20, check_probe=False).model_copy(
            update={"restore": str(folder)}
        )
        program = self.programs[rank]
        probe = Probe(program, spec.seed, self.device, ranks)
        order = Order(
            len(program.dataset), program.batch_size, spec.seed, drop_last=False, rank=rank, ranks=ranks, accumulation=1
        )
        environment = structure.environment(program, ranks, self.device)
        restore.from_checkpoint(spec, program, probe, environment, Vitals(spec, os.getpid()), order)


def test_the_restore_in_the_child_refuses_each_and_names_the_file(trained, bench):
    child = Child(trained)
    with torch.random.fork_rng():
        assert failing(trained, bench, refused(child.restore), 2) == []
        child.restore(bench.put())


def test_the_copier_refuses_each_and_names_the_file(trained, bench):
    def read(folder: Path) -> str:
        bench.forget()
        copy_on(bench)
        if checkpoint.find(bench.places.checkpoints("persistent"))[0]:
            return ""
        reason = marks.reason(bench.places, LAST, "local", State.quarantined)
        if not reason and not (folder / MANIFEST).exists():  # that is a save that was never committed
            return MANIFEST
        return reason.removeprefix(f"{LAST}: ").partition(" ")[0]

    assert failing(trained, bench, read, 9) == []
    bench.forget()
    bench.put()
    copy_on(bench)
    assert checkpoint.verify_checkpoint(bench.places.checkpoint("persistent", Key(20, 1))).ok


def copy_on(bench: Bench) -> None:
    copier = bench.copier()
    while copier.turn(thorough=True):
        pass


def test_resume_takes_the_newest_good_one(trained, bench):
    """What was hurt on one tier is taken from the other; hurt on both, the one before is taken."""
    for one in random.Random(1).sample(mutations(trained, random.Random(1)), 400 if ALL else 12):
        bench.forget()
        for name in (BEFORE, LAST):
            bench.put("persistent", name)
        one.hurt(bench.put())
        start = resume.choose(bench.places, {1: 0}, lambda *_, **__: None, trust_marks=False)
        assert (start.step, start.tier) == (20, "persistent"), one.name
        one.hurt(bench.put("persistent"))
        start = resume.choose(bench.places, {1: 0}, lambda *_, **__: None, trust_marks=False)
        assert (start.step, start.tier) == (10, "persistent"), one.name


# --- the object tier


def upload(tier: object_tier.ObjectTier, trained: Trained) -> None:
    for name in (BEFORE, LAST):
        tier.upload(trained.folder(name), lambda: None)
    tier.write("structure.json", trained.places.structure.read_bytes())
    tier.write("run.json", (trained.places.persistent / "run.json").read_bytes())


def link(source: str, target: str) -> None:
    if Path(source).is_fifo():
        os.mkfifo(target)
    else:
        os.link(source, target)


def fetched(tier: object_tier.ObjectTier, target: Path) -> str:
    """The name of the file for which a fetch refuses; empty if it refuses none."""
    for old in target.parent.iterdir():  # whole files of an earlier try would be taken up
        shutil.rmtree(old)
    try:
        tier.fetch(Key(20, 1), target)
    except Damaged as error:
        return error.path
    except NotThere:
        return MANIFEST
    return ""


def test_a_directory_as_object_tier_gives_none_of_them_back(trained, bench, tmp_path):
    tier = object_tier.open_run(str(bench.places.object))
    upload(tier, trained)
    place, target = Path(str(bench.places.object)) / "checkpoints" / LAST, tmp_path / "fetched" / LAST
    target.parent.mkdir()

    def read(folder: Path) -> str:
        """As far as an object store can look like that: it has no folders, links or pipes that could be too many."""
        shutil.rmtree(place)
        shutil.copytree(folder, place, symlinks=True, copy_function=link)
        name = fetched(tier, target)
        if not name:  # what is no damage of bytes is for the verification that comes after every fetch
            structure = checkpoint.read_structure(bench.places.persistent)
            name = checkpoint.verify(target, structure, RUN, JOB).file
        return name

    assert failing(trained, bench, read, 3, lambda one: one.on_objects or not one.name.startswith("extra")) == []


def test_s3_gives_none_of_them_back(trained, bench, tmp_path, s3_server, monkeypatch):
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    bucket = s3_server.bucket()
    uri = f"s3://{bucket}/place/{JOB}/{RUN}"
    far = f"{uri}/checkpoints/{LAST}"
    from everstep.core.place import S3Settings
    from everstep.store import s3

    upload(object_tier.open_run(uri, s3.access(S3Settings())), trained)
    assert checkpoint.verify_checkpoint(far).ok
    good = {path.name: path.read_bytes() for path in trained.folder().iterdir()}
    dice = random.Random(trained.shape.name)
    able = [one for one in mutations(trained, dice) if one.on_objects]
    chosen = dice.sample(able, 200 if ALL else 15) + [one for one in able if one.name.startswith("extra")]
    wrong = []
    for one in chosen:
        folder = bench.put()
        one.hurt(folder)
        hurt = {path.name: path.read_bytes() for path in folder.iterdir()}
        change_objects(s3_server, bucket, f"place/{JOB}/{RUN}/checkpoints/{LAST}", good, hurt)
        result = checkpoint.verify_checkpoint(far)
        named = {result.file, refused_far(far)}
        if not named <= one.names:
            wrong.append(f"{one.name}: {named} {result.why}")
        change_objects(s3_server, bucket, f"place/{JOB}/{RUN}/checkpoints/{LAST}", hurt, good)
    assert wrong == []
    assert checkpoint.verify_checkpoint(far).ok


def refused_far(uri: str) -> str:
    """The file for which `load_checkpoint` refuses; empty if it does not."""
    try:
        load_checkpoint(uri)
    except Damaged as error:
        return error.path
    except NotThere:
        return MANIFEST
    return ""


def change_objects(server, bucket: str, prefix: str, was: dict[str, bytes], now: dict[str, bytes]) -> None:
    server.put(bucket, {f"{prefix}/{name}": data for name, data in now.items() if was.get(name) != data})
    for name in was.keys() - now.keys():
        server.client().delete_object(Bucket=bucket, Key=f"{prefix}/{name}")
