"""The base of all records: frozen, closed to unknown fields, and versioned where they rest on a disk."""

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
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "the whole file"
            raise Damaged(where, path, f"is not a readable {cls.__name__} ({field}: {first['msg']})") from None
        if record.schema_version != cls.VERSION:
            why = f"has schema version {record.schema_version}; this Everstep reads version {cls.VERSION}"
            raise Damaged(where, path, why)
        return record

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"
