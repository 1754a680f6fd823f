"""Which code a run trains with, as a short digest that stands in every manifest."""

import hashlib
from pathlib import Path

import everstep
from everstep.host.jobs import program_file


def version(program: str) -> str:
    """Digest of the program's own file and of Everstep's trainer, 16 hex digits."""
    digest = hashlib.sha256()
    trainer = Path(everstep.__file__).parent / "trainer"
    for file in [program_file(program, Path.cwd()), *sorted(trainer.glob("*.py"))]:
        if file is not None and file.is_file():
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
