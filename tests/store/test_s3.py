"""The S3 store against a real server, with a proxy between that does harm."""

import os
import threading
import time

import pytest
from pydantic import SecretStr
from rigs.proxy import Fault

from everstep.core.errors import StoreUnavailable
from everstep.core.place import S3Settings
from everstep.store import s3
from everstep.store.objects import Changed, Exists, NotThere

BODY = os.urandom(300_000)
QUICK = s3.Patience(attempts=5, seconds=20, first=0.01, most=0.05)


@pytest.fixture(scope="module")
def shared(s3_server):
    return s3_server.bucket()


@pytest.fixture
def prefix(request):
    return f"p{abs(hash(request.node.nodeid)):x}"


@pytest.fixture
def way(s3_server, s3_proxy):
    """An access through the proxy."""
    return access_of(s3_server, s3_proxy.endpoint)


@pytest.fixture
def store(shared, way):
    made = s3.open_store(shared, way, patience=QUICK)
    yield made
    made.close()


def access_of(server, endpoint=None, identity="admin", **changes):
    env = server.env(identity) | {"AWS_ENDPOINT_URL": endpoint or server.endpoint}
    key, secret = server.keys[identity]
    keys = s3.Keys(changes.get("key", key), SecretStr(changes.get("secret", secret)))
    return s3.access(S3Settings(), keys=keys, env=env)


def test_what_is_written_is_listed_described_read_and_deleted(store, prefix):
    store.put(f"{prefix}/b", b"bb")
    store.put(f"{prefix}/a/ü #%*~+&=.txt", BODY)
    store.put(f"{prefix}-beside", b"")
    listed = list(store.list(prefix))
    assert [(one.key, one.size) for one in listed] == [(f"{prefix}/a/ü #%*~+&=.txt", 300_000), (f"{prefix}/b", 2)]
    assert abs(listed[0].modified - time.time()) < 60
    assert store.head(f"{prefix}/b").etag == listed[1].etag != ""
    assert store.head(f"{prefix}/none") is None
    key = listed[0].key
    assert store.read(key) == BODY
    assert store.read(key, 10) == BODY[10:]
    assert store.read(key, 10, 2000, etag=listed[0].etag) == BODY[10:2000]
    assert store.read(key, 5, 5) == b""
    assert store.read(f"{prefix}-beside") == b""
    store.delete(key)
    store.delete(key)
    with pytest.raises(NotThere):
        store.read(key)
    assert [one.key for one in store.list(prefix)] == [f"{prefix}/b"]


def test_a_new_object_is_listed_at_once_by_a_store_that_has_looked_before(store, shared, way, prefix):
    """Cases BC-118 and BC-119: no listing is remembered, in one object or in another one of the same process."""
    assert list(store.list(prefix)) == []
    other = s3.open_store(shared, way, patience=QUICK)
    other.put(f"{prefix}/a", b"1")
    other.put(f"{prefix}/b", b"1")
    assert [one.key for one in store.list(prefix)] == [f"{prefix}/a", f"{prefix}/b"]
    store.delete(f"{prefix}/a")
    assert [one.key for one in other.list(prefix)] == [f"{prefix}/b"]


def test_lists_of_several_pages_are_whole(store, prefix, monkeypatch):
    monkeypatch.setattr(s3, "PAGE", 3)
    keys = [f"{prefix}/{number:02d}" for number in range(10)]
    for key in keys:
        store.put(key, b"")
    assert [one.key for one in store.list(prefix)] == keys


def test_an_object_that_changes_is_noticed_and_the_next_read_is_fresh(store, prefix):
    """Case BC-121: a read after the source changed is refused, a new look works in the same process."""
    key = f"{prefix}/a"
    store.put(key, BODY)
    before = store.head(key).etag
    store.put(key, BODY[::-1])
    with pytest.raises(Changed):
        store.read(key, 0, 100, etag=before)
    assert store.read(key, 0, 100, etag=store.head(key).etag) == BODY[::-1][:100]
    store.put(key, b"short")
    with pytest.raises(Changed):
        store.read(key, 10, 100)


def test_a_store_that_ignores_if_match_is_caught_by_its_answer(store, s3_proxy, prefix):
    key = f"{prefix}/a"
    store.put(key, BODY)
    s3_proxy.plan(Fault("changed", "GET"))
    with pytest.raises(Changed):
        store.read(key, etag=store.head(key).etag)


def test_create_is_won_by_one(store, prefix):
    key = f"{prefix}/claim"
    won = []

    def claim(number):
        try:
            store.put(key, b"%d" % number, create=True)
        except Exists:
            return
        won.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read(key) == b"%d" % won[0]


def test_a_create_whose_answer_is_lost_is_known_as_ones_own(store, s3_proxy, prefix):
    s3_proxy.plan(Fault("lose_reply", "PUT"))
    store.put(f"{prefix}/claim", b"mine", create=True)
    s3_proxy.plan(Fault("lose_reply", "PUT"))
    with pytest.raises(Exists, match="claim is there already"):
        store.put(f"{prefix}/claim", b"another's", create=True)


@pytest.mark.parametrize("size", [0, 100, 5 << 20, 40 << 20])
def test_a_file_is_written_whole(store, prefix, tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    told = []
    store.put_file(f"{prefix}/file", path, moved=told.append)
    assert sum(told) == size
    assert store.read(f"{prefix}/file") == path.read_bytes()


HARM = ["internal", "slow_down", "reset", "cut", "short"]


@pytest.mark.parametrize("do", HARM)
def test_a_read_is_repeated_until_it_is_whole(store, s3_proxy, prefix, do):
    """Case BC-114: whatever breaks the body, wherever, the bytes are right."""
    store.put(f"{prefix}/a", BODY)
    for at in (0, 1, 100, 150_000, 299_999):
        s3_proxy.plan(Fault(do, "GET", at=at))
        assert store.read(f"{prefix}/a") == BODY
        s3_proxy.plan(Fault(do, "GET", at=at))
        assert store.read(f"{prefix}/a", 0, 300_000) == BODY


@pytest.mark.parametrize("do", ["internal", "slow_down", "reset", "lose_reply"])
def test_lists_heads_writes_and_deletes_are_repeated(store, s3_proxy, prefix, tmp_path, do):
    """Case BC-124: what a network loses is asked again."""
    key, path = f"{prefix}/a", tmp_path / "file"
    path.write_bytes(BODY)
    for method, call in {
        "PUT": lambda: store.put(key, BODY),
        "HEAD": lambda: store.head(key),
        "GET": lambda: list(store.list(prefix)),
        "DELETE": lambda: store.delete(key),
    }.items():
        s3_proxy.clear()
        s3_proxy.plan(Fault(do, method, times=2))
        call()
        assert len(s3_proxy.seen(method)) == 3
    s3_proxy.plan(Fault(do, "PUT", times=2))
    store.put_file(key, path)
    assert store.read(key) == BODY


def test_patience_ends_in_a_sentence(store, s3_proxy, prefix):
    s3_proxy.plan(Fault("slow_down", times=-1))
    with pytest.raises(
        StoreUnavailable, match=rf"s3://.*/{prefix}/a: http://127.* SlowDown, after 5 attempts; the same"
    ):
        store.read(f"{prefix}/a")
    with pytest.raises(StoreUnavailable, match="SlowDown, after 5 attempts"):
        list(store.list(prefix))


def test_a_store_that_never_answers_meets_the_deadline(shared, s3_server, s3_proxy, prefix, monkeypatch):
    """Case BC-124: a total deadline, not only one for each attempt."""
    monkeypatch.setattr(s3.s3_clients, "READ_SECONDS", 0.3)
    store = s3.open_store(shared, access_of(s3_server, s3_proxy.endpoint), patience=s3.Patience(100, 2.0, 0.05, 0.1))
    store.put(f"{prefix}/a", BODY)
    s3_proxy.plan(Fault("stall", "GET", times=1), Fault("stall", "GET", at=1000, times=1))
    assert store.read(f"{prefix}/a") == BODY
    s3_proxy.plan(Fault("stall", times=-1))
    for call in (lambda: store.read(f"{prefix}/a"), lambda: list(store.list(prefix))):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="does not answer"):
            call()
        assert time.monotonic() - began < 6


def test_nobody_listens(s3_server, shared):
    from rigs.seaweed import free_ports

    store = s3.open_store(shared, access_of(s3_server, f"http://127.0.0.1:{free_ports(1)[0]}"), patience=QUICK)
    for call in (lambda: store.read("a"), lambda: list(store.list("")), lambda: store.put("a", b"")):
        with pytest.raises(StoreUnavailable, match=r"http://127\.0\.0\.1:\d+ does not answer"):
            call()


def test_closing_ends_the_patience_of_waiting_threads(s3_server, s3_proxy, shared):
    store = s3.open_store(shared, access_of(s3_server, s3_proxy.endpoint), patience=s3.Patience(9, 60, 30, 30))
    s3_proxy.plan(Fault("slow_down", times=-1))
    ended = []

    def read():
        with pytest.raises(StoreUnavailable):
            store.read("a")
        ended.append(True)

    thread = threading.Thread(target=read)
    thread.start()
    while not s3_proxy.requests:
        time.sleep(0.01)
    store.close()
    thread.join(5)
    assert ended


CALLS = {
    "list": lambda store: list(store.list("p")),
    "head": lambda store: store.head("p/a"),
    "read": lambda store: store.read("p/a"),
    "write": lambda store: store.put("p/a", b""),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": "UNKNOWNKEY"}, "does not know the access key; check AWS_ACCESS_KEY_ID or the profile"),
        ({"secret": "wrong-secret-value"}, "the secret key does not belong to the access key"),
        ({"identity": "stranger"}, "gives these credentials no right to"),
    ],
    ids=["unknown key", "wrong secret", "no rights"],
)
def test_wrong_credentials_are_a_sentence_without_a_secret(s3_server, shared, changes, words, call):
    s3_server.put(shared, {"p/a": b"1"})
    store = s3.open_store(shared, access_of(s3_server, **changes), patience=QUICK)
    with pytest.raises(ValueError, match=words) as error:
        CALLS[call](store)
    said = f"{error.value!r} {error.value.__cause__!r} {store!r}"
    assert "wrong-secret-value" not in said
    assert not any(secret in said for _, secret in s3_server.keys.values())
    assert "\n" not in str(error.value)


def test_no_right_to_write(s3_server, shared, tmp_path):
    s3_server.put(shared, {"p/a": b"1"})
    store = s3.open_store(shared, access_of(s3_server, identity="reader"), patience=QUICK)
    assert store.read("p/a") == b"1"
    (tmp_path / "f").write_bytes(b"1")
    for call in (lambda: store.put("p/a", b""), lambda: store.put_file("p/a", tmp_path / "f")):
        with pytest.raises(ValueError, match=r"s3://.*/p/a: .* no right to write it; ask its owner"):
            call()


@pytest.mark.parametrize("call", ["list", "read", "write"])
def test_a_missing_bucket_is_a_sentence(s3_server, call):
    store = s3.open_store("no-such-bucket", access_of(s3_server, identity="reader"), patience=QUICK)
    if call == "write":
        store = s3.open_store("no-such-bucket", access_of(s3_server), patience=QUICK)
    with pytest.raises(ValueError, match="s3://no-such-bucket: there is no such bucket at http"):
        CALLS[call](store)


def test_keys_that_have_run_out_are_asked_for_anew_once(s3_server, s3_proxy, shared, prefix, monkeypatch):
    for name, value in (s3_server.env() | {"AWS_ENDPOINT_URL": s3_proxy.endpoint}).items():
        monkeypatch.setenv(name, value)
    store = s3.open_store(shared, s3.access(S3Settings()), patience=QUICK)
    store.put(f"{prefix}/a", BODY)
    for method in ("GET", "HEAD"):
        s3_proxy.plan(Fault("expired", method, times=1))
    assert store.read(f"{prefix}/a") == BODY
    s3_proxy.plan(Fault("expired", times=-1))
    for call in (lambda: store.read(f"{prefix}/a"), lambda: list(store.list("")), lambda: store.head(f"{prefix}/a")):
        with pytest.raises(ValueError, match=r"the credentials for http.* have run out; renew them and start again"):
            call()


def test_a_forked_child_reads_on(store, prefix):
    """Case BC-122: the parent has used both clients; a child of fork lists, reads and writes, and does not hang."""
    for number in range(20):
        store.put(f"{prefix}/{number:02d}", b"%d" % number)
    assert store.read(f"{prefix}/00") == b"0"
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                keys = [one.key for one in store.list(prefix)]
                good = all(
                    store.read(key, 0, 9999 if n < 0 else len(b"%d" % n)) == b"%d" % n for n, key in enumerate(keys)
                )
                code = 0 if good and len(keys) == 20 else 2
            finally:
                os._exit(code)
        until = time.monotonic() + 20
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
            time.sleep(0.02)
        if ended == (0, 0):
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        assert ended[1] == 0
    assert store.read(f"{prefix}/19") == b"19"
