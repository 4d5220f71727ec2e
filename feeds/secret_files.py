"""Files with secrets: read only when other users cannot, and written so that they cannot.

A file of root's that this process reads by its group may be readable by that group: no user but root can give
it away, and so Kubernetes mounts secrets for a pod that does not run as root.
"""

import os
import stat
from pathlib import Path

from feeds.connector import SettingError


def read_secret(key: str, path: str | Path) -> str:
    """The text of a file that other users cannot read. Raises SettingError, never with the text itself."""
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            mode = stat.S_IMODE(found.st_mode)
            if is_exposed(mode, found.st_uid, os.geteuid()) and not _from_systemd(Path(path)):
                raise SettingError(
                    key, f"{path} has mode {mode:04o}: other users can use it; chmod 600 {path}"
                )
            return file.read().decode()
    except OSError as error:
        raise SettingError(key, f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingError(key, f"{path} is not text in UTF-8") from None


def read_login(key: str, path: str | Path) -> tuple[str, str]:
    """User name and password, a line each. Raises SettingError, as `read_secret` does."""
    lines = read_secret(key, path).splitlines()
    if len(lines) != 2 or not all(lines):
        raise SettingError(key, f"{path} must have two lines, user name and password; it has {len(lines)}")
    return lines[0], lines[1]


def read_headers(key: str, path: str | Path) -> dict[str, str]:
    """Headers of HTTP, a line each; none without a path. Raises SettingError, as `read_secret` does."""
    found: dict[str, str] = {}
    for line in read_secret(key, path).splitlines() if path else ():
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise SettingError(key, f"{path}: a line is not of the form NAME: VALUE")
        found[name.strip()] = value.strip()
    return found


def is_exposed(mode: int, owner: int, user: int) -> bool:
    """Whether others can use a file of these permission bits; ``owner`` and ``user``, who reads: user ids.

    The group may read what is root's, unless it is root who reads.
    """
    allowed = 0o740 if owner == 0 != user else 0o700
    return mode & ~allowed & 0o777 != 0


def _from_systemd(path: Path) -> bool:
    """Whether systemd guards the file (`LoadCredential=`), by access lists that its mode does not show."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return folder != "" and path.resolve().is_relative_to(Path(folder).resolve())


def write_secret(path: Path, text: str) -> None:
    """Write a new file of mode 0600. Raises OSError, FileExistsError rather than overwrite."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
