"""Files with secrets: read only when other users cannot, and written so that they cannot."""

import os
import stat
from pathlib import Path

from feeds.connector import SettingError


def read_secret(key: str, path: str | Path) -> str:
    """The text of a file that only its owner can read. Raises SettingError, never with the text itself."""
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_IMODE(mode) & 0o077 and not _from_systemd(Path(path)):
                raise SettingError(
                    key,
                    f"{path} has mode {stat.S_IMODE(mode):04o}: other users can use it; chmod 600 {path}",
                )
            return file.read().decode()
    except OSError as error:
        raise SettingError(key, f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingError(key, f"{path} is not text in UTF-8") from None


def _from_systemd(path: Path) -> bool:
    """Whether systemd guards the file (`LoadCredential=`), by access lists that its mode does not show."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return folder != "" and path.resolve().is_relative_to(Path(folder).resolve())


def write_secret(path: Path, text: str) -> None:
    """Write a new file of mode 0600. Raises OSError, FileExistsError rather than overwrite."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
