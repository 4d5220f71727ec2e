"""Compare what is planned with what is there, write it, and remove what was written.

Paths are those of the target machine, below ``root``. The manifest has the hash of each file that was
written; a file that differs from it was changed since, and is kept.
"""

import difflib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from daemon.install.planned import InstallError, Planned
from support.durable_file import replacing

MANIFEST = "/etc/foretick/installed.json"
_ENABLED = "etc/systemd/system/*.wants/foretick*"

Action = Literal["write", "update", "remove", "keep", "leave"]
"""``keep``: it is not as planned, or not as written. ``leave``: nothing is to be done."""


class Manifest(msgspec.Struct, frozen=True):
    """What was written: SHA-256 by file, and directories, each after the one that it is in."""

    files: dict[str, str] = {}
    directories: list[str] = []


class Step(msgspec.Struct, frozen=True):
    """What is done about a path. ``why`` it is kept; ``diff``: from what is there to what is planned."""

    action: Action
    path: str
    planned: Planned | None = None
    why: str = ""
    diff: str = ""


def read_manifest(root: Path) -> Manifest:
    """What is installed below ``root``. Raises InstallError, OSError."""
    data = _read(root, MANIFEST)
    try:
        return Manifest() if data is None else msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise InstallError(f"{MANIFEST} does not list installed files: {error}") from None


def install_steps(root: Path, plan: Sequence[Planned], manifest: Manifest, *, force: bool) -> list[Step]:
    """What an installation does. ``force``: replace a changed unit, too. Raises InstallError, OSError."""
    return [
        _directory(root, each) if each.text is None else _file(root, each, manifest, force) for each in plan
    ]


def _directory(root: Path, wanted: Planned) -> Step:
    path = _target(root, wanted.path)
    if not path.is_dir():
        if path.exists():
            raise InstallError(f"{wanted.path} is a file, where a directory is to be: move it away")
        return Step("write", wanted.path, wanted)
    mode = path.stat().st_mode & 0o777
    if mode & ~wanted.mode:
        why = f"its mode is {mode:04o}: chmod {wanted.mode:04o} {wanted.path}"
        return Step("keep", wanted.path, wanted, why)
    return Step("leave", wanted.path, wanted)


def _file(root: Path, wanted: Planned, manifest: Manifest, force: bool) -> Step:
    found = _read(root, wanted.path)
    if found is None:
        return Step("write", wanted.path, wanted)
    if found == wanted.data:
        return Step("leave", wanted.path, wanted)
    if wanted.edited:
        return Step("keep", wanted.path, wanted, "it is the administrator's")
    if force or _hash(found) == manifest.files.get(wanted.path):
        return Step("update", wanted.path, wanted)
    old, new = (each.decode(errors="replace").splitlines() for each in (found, wanted.data))
    diff = "\n".join(difflib.unified_diff(old, new, "there", "planned", lineterm=""))
    return Step("keep", wanted.path, wanted, "it was changed; --force replaces it", diff)


def install(root: Path, steps: Sequence[Step], manifest: Manifest) -> None:
    """Write directories, the manifest, then files, so that half of it can be undone, too. Raises OSError."""
    due = [each.planned for each in steps if each.planned and each.action in ("write", "update")]
    if not due:
        return
    modes = {each.path: each.mode for each in due if each.text is None}
    made = list(dict.fromkeys(path for each in due for path in _missing(root, each)))
    for path in made:
        _below(root, path).mkdir()
        _below(root, path).chmod(modes.get(path, 0o755))
    hashes = {each.path: _hash(each.data) for each in due if each.text is not None}
    written = Manifest(manifest.files | hashes, [*manifest.directories, *made])
    _write(_below(root, MANIFEST), msgspec.json.format(msgspec.json.encode(written)) + b"\n", 0o644)
    for each in due:
        if each.text is not None:
            _write(_below(root, each.path), each.data, each.mode)


def undo_steps(root: Path, manifest: Manifest) -> list[Step]:
    """What undoes an installation: files as they were written, then directories that are empty without them.

    Raises InstallError where nothing is installed or a unit is enabled, OSError.
    """
    if not manifest.files and not manifest.directories:
        raise InstallError(f"nothing is installed: there is no {MANIFEST}")
    for link in sorted(root.glob(_ENABLED)):
        raise InstallError(f"{link.name} is enabled: systemctl disable --now {link.name}")
    steps = [_removal(root, path, written) for path, written in manifest.files.items()]
    removed = {MANIFEST, *(each.path for each in steps if each.action == "remove")}
    for path in reversed(manifest.directories):
        if not _target(root, path).is_dir():
            steps.append(Step("leave", path))
        elif kept := sorted(_names(root, path) - removed):
            steps.append(Step("keep", path, why=f"it holds {', '.join(kept)}"))
        else:
            removed.add(path)
            steps.append(Step("remove", path))
    return steps


def _names(root: Path, path: str) -> set[str]:
    """The paths of what is in a directory."""
    return {str(PurePosixPath(path, each.name)) for each in _below(root, path).iterdir()}


def _removal(root: Path, path: str, written: str) -> Step:
    found = _read(root, path)
    if found is None:
        return Step("leave", path)
    return Step("remove", path) if _hash(found) == written else Step("keep", path, why="it was changed")


def undo(root: Path, steps: Sequence[Step]) -> None:
    """Take the steps; the manifest goes before the directory that it is in. Raises OSError."""
    due = [_below(root, each.path) for each in steps if each.action == "remove"]
    folders = [each for each in due if each.is_dir()]
    for path in (*(each for each in due if each not in folders), _below(root, MANIFEST)):
        path.unlink(missing_ok=True)
    for path in folders:
        path.rmdir()


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _target(root: Path, path: str) -> Path:
    """The same, where nothing is written or removed through a link. Raises InstallError, OSError."""
    target = _below(root, path)
    if target.is_symlink():
        to = target.readlink()
        if str(to) == os.devnull:
            raise InstallError(f"{target.name} is masked: systemctl unmask {target.name}")
        raise InstallError(f"{path} is a link to {to}: move it away")
    for parent in target.parents:
        if parent.is_symlink() and not parent.exists():
            raise InstallError(f"{path}: {parent} is a link to {parent.readlink()}, which is not there")
    if not (leads := target.parent.resolve()).is_relative_to(root.resolve()):
        raise InstallError(f"{path}: a link leads out of {root}, to {leads}")
    return target


def _missing(root: Path, wanted: Planned) -> list[str]:
    """The directories to make for it, each after the one that it is in."""
    path = PurePosixPath(wanted.path)
    needed = [*reversed(path.parents), *([path] if wanted.text is None else [])]
    return [str(each) for each in needed if not _below(root, str(each)).exists()]


def _read(root: Path, path: str) -> bytes | None:
    try:
        return _target(root, path).read_bytes()
    except FileNotFoundError:
        return None


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes, mode: int) -> None:
    with replacing(path) as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
