"""What an installation holds: each file with its text, and each directory."""

import re
from importlib.resources import files
from pathlib import Path

import msgspec

EXAMPLES = ("kafka", "replay", "zeromq")
"""Configurations of this package that `foretick.toml` may begin as."""
CONFIG = "/etc/foretick/foretick.toml"
SECRETS = "credentials.conf"
"""An example of a drop-in, which is in force when the administrator has copied it beside the unit."""
SOCKETS = ("foretick-http.socket", "foretick-query.socket")
"""Units that hold the ports of the one daemon over its restarts, once the administrator enables them."""
_UNITS = "/etc/systemd/system"
_PROGRAM = "/opt/foretick/bin/foretick"
"""What the units of this package run, until it is replaced."""
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What the units do not see, by `ProtectHome=` and `PrivateTmp=`."""
_PLAIN = re.compile(r"/[\w./+@~,=-]+")
"""Paths that need no quotes in a unit."""


class InstallError(Exception):
    """Why nothing can be installed or removed, in one sentence."""


class Planned(msgspec.Struct, frozen=True):
    """A file, or a directory (``text`` None). ``edited``: by the administrator, so it is never replaced."""

    path: str
    mode: int
    text: str | None = None
    edited: bool = False

    @property
    def data(self) -> bytes:
        """The text as it is written."""
        return (self.text or "").encode()


def planned(program: Path, example: str, *, instance: bool) -> list[Planned]:
    """All of an installation whose unit runs ``program``. ``instance``: the unit is the template."""
    data = files(__package__)
    unit = "foretick@.service" if instance else "foretick.service"
    text = (data / unit).read_text(encoding="utf-8").replace(_PROGRAM, str(program))
    sockets = () if instance else SOCKETS
    names = (f"{example}.toml", SECRETS, "sysusers.conf")
    config, secrets, groups = ((data / name).read_text(encoding="utf-8") for name in names)
    return [
        Planned("/etc/foretick", 0o755),
        Planned("/etc/foretick/credentials", 0o700),
        Planned(CONFIG, 0o644, config, edited=True),
        Planned(f"/etc/foretick/{SECRETS}", 0o644, secrets),
        Planned("/etc/sysusers.d/foretick.conf", 0o644, groups),
        Planned(f"{_UNITS}/{unit}", 0o644, text),
        *(Planned(f"{_UNITS}/{name}", 0o644, (data / name).read_text(encoding="utf-8")) for name in sockets),
    ]


def usable(program: Path) -> Path:
    """The path, if units can run what is there. Raises InstallError."""
    if not _PLAIN.fullmatch(str(program)):
        raise InstallError(f"{program} cannot stand in a unit: give a plain absolute path (--program)")
    if any(program.is_relative_to(hidden) for hidden in _HIDDEN):
        raise InstallError(
            f"the unit cannot run {program}: it sees nothing in {', '.join(_HIDDEN)}; install Foretick "
            "elsewhere, such as in /opt/foretick, or name another program (--program)"
        )
    return program
