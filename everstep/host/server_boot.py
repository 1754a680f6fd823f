"""Become the embedded Prefect server: `python -I -S server_boot.py <cache folder> <database> <listening fd>`.

The database is a copy of a migrated template, because migrating an empty one takes several times as long as starting
the server. The template is made once for each version of Prefect: in a child, under a lock, renamed into its place when
it is whole. Imports nothing but the standard library; then replaces itself by the server.
"""

import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

TEMPLATE = "server.db"

_MIGRATE = """
import asyncio
from prefect.server.database import provide_database_interface
from prefect.server.models.block_registration import run_block_auto_registration

async def main():
    database = provide_database_interface()
    await database.create_db()
    async with await database.session() as session:
        await run_block_auto_registration(session=session)
    await (await database.engine()).dispose()

asyncio.run(main())
"""


def main(arguments: list[str]) -> None:
    cache, database, descriptor = Path(arguments[0]), Path(arguments[1]), arguments[2]
    try:
        _copy_of_template(cache, database)
    except OSError as error:
        sys.stderr.write(f"{error}; migrating a new database instead\n")
        _migrate(database)
    serve = ("-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--fd", descriptor)
    os.execv(sys.executable, [sys.executable, *serve, "--log-level", "warning", "--lifespan", "on"])  # noqa: S606


def _copy_of_template(cache: Path, database: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(cache / TEMPLATE):
            building = cache / "building"
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            _migrate(building / TEMPLATE)
            with (building / TEMPLATE).open("rb+") as file:
                os.fsync(file.fileno())
            (building / TEMPLATE).replace(cache / TEMPLATE)
            shutil.rmtree(building, ignore_errors=True)
        shutil.copyfile(cache / TEMPLATE, database)


def _is_whole(template: Path) -> bool:
    if not template.exists():
        return False
    connection = sqlite3.connect(template)
    try:
        migrated = connection.execute("SELECT count(*) FROM alembic_version").fetchone()[0]
        return bool(migrated) and connection.execute("PRAGMA quick_check").fetchone()[0] == "ok"
    except sqlite3.DatabaseError:
        return False
    finally:
        connection.close()


def _migrate(database: Path) -> None:
    env = {**os.environ, "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}"}
    subprocess.run([sys.executable, "-c", _MIGRATE], env=env, cwd=database.parent, check=True)
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1:])
