"""Checkpoints on a disk: find them, read their manifests, and verify them by an independent read.

Commit rule: the manifest is written last. A folder without a manifest that verifies is not a checkpoint.
"""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from everstep.core.checkpoint import MANIFEST, Key, Manifest, Structure, Verification
from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.core.place import is_object
from everstep.store import contents, digest, faults, tensors
from everstep.store.objects import NotThere

MANIFEST_LIMIT = 64 << 20  # bytes


def find(checkpoints: Path) -> tuple[list[Key], list[Key]]:
    """The committed and the torn (uncommitted) checkpoints in a tier's folder, oldest first."""
    committed: list[Key] = []
    torn: list[Key] = []
    try:
        entries = sorted(os.scandir(checkpoints), key=lambda entry: entry.name)
    except FileNotFoundError:
        return [], []
    for entry in entries:
        key = Key.parse(entry.name)
        if key and entry.is_dir(follow_symlinks=False):
            (committed if os.path.lexists(Path(entry.path, MANIFEST)) else torn).append(key)
    return sorted(committed), sorted(torn)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint. Raises Damaged, naming it, if it is missing, unreadable or altered."""
    return _parse_manifest(folder, read_manifest_bytes(folder))


def opened(folder: Path, run: str | None = None, job: str | None = None) -> Manifest:
    """The manifest of a checkpoint that is to be read, as far as a look at its folder can tell.

    It is that of this folder, run and job, and the folder holds exactly its files: regular ones, of the right sizes. Whoever
    reads them then proves their bytes. Raises Damaged, naming the file; OSError as it comes.
    """
    manifest = read_manifest(folder)
    _check_identity(folder, manifest, run, job)
    _check_listing(folder, manifest)
    return manifest


def read_manifest_bytes(folder: Path) -> bytes:
    """The manifest as it lies on the disk."""

    def read() -> bytes:
        handle = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Damaged(folder.name, MANIFEST, "is not a regular file")
            return file.read(MANIFEST_LIMIT + 1)

    data = contents.reading(folder, MANIFEST, read)
    if len(data) > MANIFEST_LIMIT:
        raise Damaged(folder.name, MANIFEST, f"has more than {MANIFEST_LIMIT} bytes")
    return data


def manifest_digest(folder: Path) -> str | None:
    """The digest of the manifest that stands in a checkpoint's folder now; None if there is none to read."""
    try:
        return digest.of_bytes(read_manifest_bytes(folder))
    except Damaged:
        return None


def verify_checkpoint(uri: str | Path) -> Verification:
    """Read a checkpoint back: whole, unaltered, finite, and of the right shapes.

    `uri` is a folder or a file:// URI of it, or an s3:// URI, whose bytes are fetched as the environment says; the run's
    structure and identity count if its records stand two folders above. Nothing of the checkpoint is executed.

    Raises ValueError for another kind of URI, StoreUnavailable if the tier does not answer.
    """
    if is_object(str(uri)):
        return _verify_far(str(uri))
    folder = local_path(uri)
    run, job = identity(folder)
    return verify(folder, read_structure(folder.parent.parent), run=run, job=job)


def identity(folder: Path) -> tuple[str | None, str | None]:
    """Run and job to which a checkpoint belongs by where it stands; None where no run's record stands there."""
    run_dir = folder.parent.parent
    known = (run_dir / "run.json").is_file()
    return (run_dir.name, run_dir.parent.name) if known else (None, None)


def _verify_far(uri: str) -> Verification:
    from everstep.store import object_tier

    started = time.monotonic()
    try:
        with object_tier.nearby(uri) as folder:
            run, job = identity(folder)
            return verify(folder, read_structure(folder.parent.parent), run=run, job=job)
    except (Damaged, NotThere) as error:
        file = error.path if isinstance(error, Damaged) else MANIFEST
        return Verification(ok=False, file=file, why=str(error), seconds=time.monotonic() - started)


def read_structure(run_dir: Path) -> Structure | None:
    """What every checkpoint of the run must hold; None before its first save."""
    try:
        text = (run_dir / "structure.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Structure.parse(text, str(run_dir), "structure.json")


def verify(
    folder: Path,
    structure: Structure | None = None,
    run: str | None = None,
    job: str | None = None,
    see: Callable[[memoryview], None] | None = None,
) -> Verification:
    """Verify one checkpoint by reading every byte of it, from the device where the kernel allows it.

    Verified are: manifest (readable, unaltered, of this folder, run and job), files (exactly the listed ones, regular,
    right sizes and digests), JSON (parses, agrees with the manifest), tensors (sound headers, each one referenced;
    parameters and floating optimizer state finite; names, dtypes and shapes of the model as in `structure`). Without a
    structure the whole model must be finite; with it a buffer may hold what it likes (-inf in a mask is legal).
    `see` is shown every piece of a file as it is read, and may take its time.
    Damage is an answer (`ok` is False, `why` is a sentence that names the file). Raises StoreUnavailable if the tier
    does not answer: unknown is not damaged.
    """
    started = time.monotonic()
    seal, size = "", 0
    try:
        data = read_manifest_bytes(folder)
        seal = digest.of_bytes(data)
        manifest = _parse_manifest(folder, data)
        _check_identity(folder, manifest, run, job)
        size = _check_files(folder, manifest, structure, see)
    except Damaged as error:
        return Verification(
            ok=False, file=error.path, why=str(error), seconds=time.monotonic() - started, manifest_digest=seal
        )
    except OSError as error:
        raise StoreUnavailable(f"{folder} cannot be read now: {error.strerror or error}.") from error
    return Verification(ok=True, bytes=size, seconds=time.monotonic() - started, manifest_digest=seal)


def _parse_manifest(folder: Path, data: bytes) -> Manifest:
    manifest = Manifest.parse(data, folder.name, MANIFEST)
    if not data.endswith(b"}\n"):
        raise Damaged(folder.name, MANIFEST, "was altered: its end is cut off")
    return manifest


def _check_identity(folder: Path, manifest: Manifest, run: str | None, job: str | None) -> None:
    if Key.parse(folder.name) != manifest.key:
        raise Damaged(folder.name, MANIFEST, f"is that of {manifest.key.folder}, not of this folder")
    if run is not None and manifest.run != run:
        raise Damaged(folder.name, MANIFEST, f"is that of run {manifest.run}, not of run {run}")
    if job is not None and manifest.job != job:
        raise Damaged(folder.name, MANIFEST, f"is that of job {manifest.job}, not of job {job}")


def _check_files(
    folder: Path, manifest: Manifest, structure: Structure | None, see: Callable[[memoryview], None] | None
) -> int:
    """Small files first: what they say is believed only after their digests, so that the right file is blamed."""
    _check_listing(folder, manifest)
    weights = [entry for entry in manifest.files if entry.path.endswith(".safetensors")]
    for entry in manifest.files:
        if entry not in weights:
            _check_bytes(folder, entry, [], see)
    try:
        content = contents.read(folder, manifest)
        if structure is not None:
            contents.check_structure(content, structure)
    except Damaged:
        for entry in weights:  # a file whose header was altered is to be blamed, not one that no longer fits it
            _check_bytes(folder, entry, [], see)
        raise
    watched = contents.must_be_finite(content, structure)
    faults.point("verify.mid")
    for entry in weights:
        _check_bytes(folder, entry, [held.tensor for held in watched if held.path == entry.path], see)
    return manifest.bytes


def _check_listing(folder: Path, manifest: Manifest) -> None:
    """Exactly the listed files, regular ones, with the right sizes."""
    listed = {entry.path: entry for entry in manifest.files}
    found = {entry.name: entry for entry in os.scandir(folder)}
    for name, entry in sorted(found.items()):
        if entry.is_symlink():
            raise Damaged(folder.name, name, "is a symbolic link")
        if name != MANIFEST and name not in listed:
            raise Damaged(folder.name, name, "is not in the manifest")
        if not entry.is_file(follow_symlinks=False):
            raise Damaged(folder.name, name, "is not a regular file")
    for name, wanted in listed.items():
        if name not in found:
            raise Damaged(folder.name, name, "is missing")
        size = found[name].stat(follow_symlinks=False).st_size
        if size != wanted.size:
            raise Damaged(folder.name, name, f"has {size} bytes where the manifest says {wanted.size}")


def _check_bytes(
    folder: Path, entry: FileEntry, watched: list[tensors.Tensor], see: Callable[[memoryview], None] | None
) -> None:
    """One independent read of a file: its digest, and in the same pass its values."""

    def read() -> tuple[str, set[str]]:
        scan = tensors.Scan(watched)

        def look(piece: memoryview) -> None:
            if watched:
                scan.see(piece)
            if see:
                see(piece)

        return digest.of_file(folder / entry.path, look, cold=True, limit=entry.size), scan.found

    found, bad = contents.reading(folder, entry.path, read)
    if found != entry.blake3:
        raise Damaged(folder.name, entry.path, "does not match its BLAKE3 digest in the manifest")
    if bad:
        raise Damaged(folder.name, entry.path, f"holds NaN or infinity in {min(bad)}")


def local_path(uri: str | Path) -> Path:
    """The folder that a path or a `file://` URI names. Raises ValueError for another kind of URI."""
    text = str(uri)
    if "://" not in text:
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(f"uri: {text!r} is no folder of this machine; give a path or a file:// URI")
    return Path(url2pathname(parts.path))
