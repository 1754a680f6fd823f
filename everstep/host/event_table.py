"""The ledger's table: one append-only table of events, in SQLite or PostgreSQL."""

from collections.abc import Sequence

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    Engine,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    inspect,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.pool import NullPool

from everstep.core.ledger import Event

BUSY_SECONDS = 2
CONNECT_SECONDS = 3
STATEMENT_MS = 5000

_METADATA = MetaData()
EVENTS = Table(
    "events",
    _METADATA,
    Column("id", Text, primary_key=True),
    Column("schema_version", Integer, nullable=False),
    Column("time", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("job", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("step", BigInteger),
    Column("text", Text, nullable=False),
    Column("data", JSON, nullable=False),
    Index("events_run_time", "run", "time"),
    Index("events_kind_time", "kind", "time"),
)


def engine(uri: str) -> Engine:
    """An engine with short deadlines. A connection lives for one use: a database file that was replaced is seen."""
    url = make_url(uri)
    arguments: dict[str, object] = {}
    if url.get_backend_name() == "sqlite":
        arguments = {"timeout": BUSY_SECONDS}
    elif url.get_driver_name() in ("psycopg", "psycopg2"):
        arguments = {"connect_timeout": CONNECT_SECONDS, "options": f"-c statement_timeout={STATEMENT_MS}"}
    return create_engine(url, poolclass=NullPool, connect_args=arguments)


def sqlite_file(uri: str) -> str | None:
    """The file of a SQLite URL; None for other databases and for one in memory."""
    url = make_url(uri)
    return url.database if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:") else None


def holds(database: Engine, event_id: str) -> bool:
    """Whether the table exists and has this event."""
    with database.connect() as connection:
        if not inspect(connection).has_table(EVENTS.name):
            return False
        return connection.scalar(select(EVENTS.c.id).where(EVENTS.c.id == event_id)) is not None


def add(database: Engine, events: Sequence[Event]) -> None:
    """Insert events in one transaction, without those that are there already."""
    build = postgresql.insert if database.dialect.name == "postgresql" else sqlite.insert
    with database.begin() as connection:
        _METADATA.create_all(connection, checkfirst=True)
        statement = build(EVENTS).on_conflict_do_nothing(index_elements=["id"])
        connection.execute(statement, [_row(event) for event in events])


def find(
    database: Engine,
    *,
    job: str | None,
    run: str | None,
    kind: str | None,
    since: float | None,
    until: float | None,
    limit: int | None,
) -> list[Event]:
    """The newest `limit` events that match, oldest first."""
    wanted = {EVENTS.c.job: job, EVENTS.c.run: run, EVENTS.c.kind: kind}
    query = select(EVENTS).order_by(EVENTS.c.time.desc(), EVENTS.c.id.desc()).limit(limit)
    query = query.where(*(column == value for column, value in wanted.items() if value is not None))
    if since is not None:
        query = query.where(EVENTS.c.time >= since)
    if until is not None:
        query = query.where(EVENTS.c.time < until)
    with database.connect() as connection:
        if not inspect(connection).has_table(EVENTS.name):
            return []
        return [Event.model_validate(dict(row)) for row in connection.execute(query).mappings()][::-1]


def _row(event: Event) -> dict[str, object]:
    row = event.model_dump(mode="json")
    return {name: _storable(value) for name, value in row.items()}


def _storable(value: object) -> object:
    """PostgreSQL takes no zero characters in text; a log line may hold some."""
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if isinstance(value, dict):
        return {str(_storable(key)): _storable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_storable(inner) for inner in value]
    return value
