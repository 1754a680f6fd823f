"""The base of all records: frozen, closed to unknown fields, and versioned where they rest on a disk."""

import json
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from everstep.core.errors import Damaged


class Record(BaseModel):
    """A frozen value. Unknown fields are refused, so a typing error never passes silently."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Versioned(Record):
    """A record that rests on a disk. It says its version; a reader refuses another one in a sentence."""

    VERSION: ClassVar[int] = 1

    schema_version: int = 1

    @classmethod
    def parse(cls, text: str | bytes, where: str, path: str) -> Self:
        """Read a record from JSON.

        `where` and `path` name the folder and the file for the message. Raises `Damaged` for bytes that are no such
        record and for another schema version.
        """
        try:
            record = cls.model_validate_json(text)
        except ValidationError as error:
            cls._refuse_version(_version(text), where, path)  # a newer version may have fields that are unknown here
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "the whole file"
            raise Damaged(where, path, f"is not a readable {cls.__name__} ({field}: {first['msg']})") from None
        cls._refuse_version(record.schema_version, where, path)
        return record

    @classmethod
    def _refuse_version(cls, version: int, where: str, path: str) -> None:
        if version != cls.VERSION:
            why = f"has schema version {version}; this Everstep reads version {cls.VERSION}"
            raise Damaged(where, path, why)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"


def _version(text: str | bytes) -> int:
    """The schema version that a broken or foreign record claims; this one's where it claims none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Versioned.VERSION
    version = value.get("schema_version") if isinstance(value, dict) else None
    return version if isinstance(version, int) else Versioned.VERSION
