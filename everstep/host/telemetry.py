"""Telemetry of a node in Parquet files, by day: `<folder>/<node>/<day>/gpus-<hour>.parquet`, and `hosts-...` beside them.

Rows are kept for a batch and then written as a small file `gpus-<hour>.<serial>.parquet`; when the hour is over these become
one. A file is whole or absent, so a writer that is killed loses its last batch and leaves nothing that cannot be read. Days
are UTC. The oldest go first when there are more bytes than allowed, or less room on the disk than is to be left.
"""

import json
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from everstep.core.gpu import Sweep
from everstep.core.host import HostSample
from everstep.core.telemetry import GPU_COLUMNS, HOST_COLUMNS, gpu_rows, host_row
from everstep.store import atomic

if TYPE_CHECKING:
    import pandas as pd

BATCH_SECONDS = 60.0
MOST_ROWS = 20_000
"""Of rows that no disk takes, so many are kept: 40 minutes of 8 GPUs at one sample a second."""

MOST_PARTS = 4000
DISK_BYTES = 10 * 10**9
LEFT_BYTES = 10**9
"""Room that is left to others on the same disk: telemetry must not take what a checkpoint needs."""

_TYPES = {"float": pa.float32(), "int": pa.int64(), "bool": pa.bool_(), "text": pa.string(), "time": pa.float64()}
_NAME = re.compile(r"(gpus|hosts)-(\d\d)(?:\.(\w+))?\.parquet")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_MADE_OF = b"everstep_made_of"


def _schema(columns: Mapping[str, str]) -> pa.Schema:
    return pa.schema([(name, _TYPES[kind]) for name, kind in columns.items()])


SCHEMAS = {"gpus": _schema(GPU_COLUMNS), "hosts": _schema(HOST_COLUMNS)}


class Telemetry:
    """Writes the telemetry of one node. For one thread; no method raises for a disk that refuses: `trouble` says why."""

    def __init__(
        self,
        folder: Path,
        node: str,
        *,
        batch_seconds: float = BATCH_SECONDS,
        disk_bytes: int = DISK_BYTES,
        left_bytes: int = LEFT_BYTES,
    ) -> None:
        self.trouble = ""
        self.lost = 0
        self._home = folder / safe(node)
        self._node = node
        self._batch_seconds = batch_seconds
        self._disk_bytes = disk_bytes
        self._left_bytes = left_bytes
        self._rows: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        self._began: float | None = None
        self._serial = 0
        self._mark = secrets.token_hex(3)
        self._is_tidy = False

    def add(self, sweep: Sweep | None = None, host: HostSample | None = None) -> None:
        """Take what was sampled; a full batch is written."""
        if sweep is not None:
            self._take("gpus", sweep.time, gpu_rows(sweep, self._node))
        if host is not None:
            self._take("hosts", host.time, [host_row(host)])
        newest = max(one.time for one in (sweep, host) if one is not None) if sweep or host else None
        if newest is None:
            return
        if self._began is None or newest < self._began:
            self._began = newest
        if newest - self._began >= self._batch_seconds:
            self.flush()

    def flush(self) -> bool:
        """Write what is at hand; False where the disk refuses it. Then it is kept, and the oldest rows go where it gets too much."""
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            if not self._is_tidy:
                self._tidy()
                self._is_tidy = True
            self._make_room()
            for place in sorted(self._rows):
                self._write(place)
            self.trouble = ""
        except (OSError, pa.ArrowException) as error:
            self.trouble = f"telemetry is not written: {error}"
            self._drop()
            return False
        finally:
            self._began = None
        return True

    def close(self) -> bool:
        return self.flush()

    def _take(self, table: str, time: float, rows: Iterable[dict[str, Any]]) -> None:
        at = datetime.fromtimestamp(time, UTC)
        self._rows.setdefault((at.strftime("%Y-%m-%d"), table, at.hour), []).extend(rows)

    def _write(self, place: tuple[str, str, int]) -> None:
        day, table, hour = place
        folder = self._home / day
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            atomic.sync_folder(self._home)
        rows = self._rows[place]
        self._serial += 1
        name = f"{table}-{hour:02}.{self._mark}{self._serial:06}.parquet"
        if rows:
            made = pa.Table.from_pylist(rows, SCHEMAS[table])
            atomic.write(folder / name, _parquet([made], SCHEMAS[table]))
        del self._rows[place]
        for older in _hours(self._home):
            if older < (day, f"{hour:02}"):
                self._join(*older)

    def _tidy(self) -> None:
        """What a killed writer has left beside its files."""
        for left in self._home.glob("*/.*.tmp"):
            left.unlink(missing_ok=True)

    def _join(self, day: str, hour: str) -> None:
        """Make one file of an hour's small ones. It says which ones it holds, so that none counts twice after a kill."""
        for table, schema in SCHEMAS.items():
            folder = self._home / day
            parts = sorted(folder.glob(f"{table}-{hour}.*.parquet"))
            whole = folder / f"{table}-{hour}.parquet"
            held = _made_of(whole)
            fresh = [part for part in parts if part.name not in held]
            if fresh:
                names = [*held, *(part.name for part in fresh)]
                sources = [whole, *fresh] if whole.exists() else fresh
                tables = [found for one in sources if (found := _readable(one, schema)) is not None]
                described = schema.with_metadata({_MADE_OF: json.dumps(names[-MOST_PARTS:]).encode()})
                atomic.write(whole, _parquet(tables, described))
            for part in parts:
                part.unlink(missing_ok=True)

    def _make_room(self) -> None:
        """Remove the oldest days, and of the last one the oldest hours, until there is room."""
        sizes = {path: path.stat().st_size for path in self._home.glob("*/*.parquet")}
        free = shutil.disk_usage(self._home).free
        over = max(sum(sizes.values()) - self._disk_bytes, self._left_bytes - free)
        days = sorted({path.parent for path in sizes})
        while over > 0 and days:
            oldest = days.pop(0)
            files = sorted(path for path in sizes if path.parent == oldest)
            for path in files if days else sorted(files, key=lambda path: _hour(path.name))[:-1]:
                if over > 0 or days:
                    path.unlink(missing_ok=True)
                    over -= sizes[path]
            with suppress(OSError):
                oldest.rmdir()
        if self._left_bytes > shutil.disk_usage(self._home).free:
            raise OSError(f"{self._home} has less than {self._left_bytes / 1e9:.3g} GB left, which are others'")

    def _drop(self) -> None:
        """Of rows that nobody took, the oldest go."""
        over = sum(map(len, self._rows.values())) - MOST_ROWS
        for place in sorted(self._rows):
            gone = min(max(0, over), len(self._rows[place]))
            del self._rows[place][:gone]
            self.lost += gone
            over -= gone


def read(
    folder: Path, *, table: str = "gpus", node: str = "", since: float = 0.0, until: float = 1e12
) -> "pd.DataFrame":
    """The telemetry of a node, or of all, as a data frame in the order of time. `since` and `until`: Unix seconds.

    `table` is `gpus` or `hosts`; the columns are those of `everstep.core.telemetry`. `until` is excluded.
    """
    import pyarrow.compute as pc

    days = (_day(since), _day(min(until, 4e9)))
    found = [SCHEMAS[table].empty_table()]
    for home in [folder / safe(node)] if node else sorted(one for one in folder.glob("*") if one.is_dir()):
        for path in _files(home, table, days):
            with suppress(FileNotFoundError):  # it became part of another one, or went, meanwhile
                rows = pq.read_table(path, schema=SCHEMAS[table], partitioning=None)
                time = rows["time"]
                found.append(rows.filter(pc.and_(pc.greater_equal(time, since), pc.less(time, until))))
    return pa.concat_tables(found).sort_by("time").to_pandas()


def _files(home: Path, table: str, days: tuple[str, str]) -> Iterator[Path]:
    """The files of a node that count: not those whose rows another one holds."""
    for day in sorted(one for one in home.glob("*") if days[0] <= one.name <= days[1] and _DAY.fullmatch(one.name)):
        names = {one.name: found for one in day.iterdir() if (found := _NAME.fullmatch(one.name)) and found[1] == table}
        held = {part for name, found in names.items() if not found[3] for part in _made_of(day / name)}
        yield from (day / name for name in sorted(names) if name not in held)


def safe(node: str) -> str:
    """A node's name as the name of a folder."""
    return re.sub(r"[^\w.-]", "_", node).lstrip(".") or "node"


def _day(time: float) -> str:
    return datetime.fromtimestamp(max(0.0, time), UTC).strftime("%Y-%m-%d")


def _hour(name: str) -> str:
    return name.partition("-")[2]


def _hours(home: Path) -> list[tuple[str, str]]:
    """The hours that have small files, oldest first."""
    names = ((path.parent.name, _NAME.fullmatch(path.name)) for path in home.glob("*/*.*.parquet"))
    return sorted({(day, found[2]) for day, found in names if found and found[3] and _DAY.fullmatch(day)})


def _made_of(path: Path) -> list[str]:
    try:
        metadata = pq.read_schema(path).metadata or {}
        return list(json.loads(metadata.get(_MADE_OF, b"[]")))
    except (FileNotFoundError, ValueError, pa.ArrowException):
        return []


def _readable(path: Path, schema: pa.Schema) -> pa.Table | None:
    """A file's rows; None for one that the disk has spoilt, which is put aside."""
    try:
        return pq.read_table(path, schema=schema, partitioning=None)
    except pa.ArrowInvalid:
        path.rename(path.with_name(f"{path.name}.unreadable"))
        return None


def _parquet(tables: Iterable[pa.Table], schema: pa.Schema) -> bytes:
    """The bytes of a file; an hour of 8 GPUs at one sample a second takes some MB."""
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for one in tables:
            writer.write_table(one.replace_schema_metadata(schema.metadata))
    return bytes(out.getvalue())
