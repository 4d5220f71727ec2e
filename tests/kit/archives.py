"""Tar archives that registries gave."""

import tarfile
from pathlib import Path


def unpack(packed: Path, home: Path, wanted: tuple[str, ...] = ("",)) -> None:
    """Write the plain files of a tar archive below ``home`` whose paths begin with one of ``wanted``.

    `extractall` trusts the archive before Python 3.11.4. Raises ValueError for a path that leads elsewhere.
    """
    with tarfile.open(packed) as archive:
        for member in archive:
            if not (member.isfile() and member.name.startswith(wanted)):
                continue
            path = Path(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{packed.name} has a file at {member.name[:200]}")
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None, "a plain file has one"
            (home / path).write_bytes(content.read())
