"""How long the certificates in the configuration's files are valid."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from daemon.config.schema import Config
from daemon.doctor.diagnosis import Diagnosis, of_outcome
from daemon.doctor.leaves import named
from support.certificates import validities_in

AUTHORITIES = "ca_file"
FILES = (AUTHORITIES, "certificate_file", "tls_certificate_file")
WARN = timedelta(days=30)


def judge_certificates(config: Config, now: datetime) -> Iterator[Diagnosis]:
    """Whether each is valid ``now``, and for a while. Of authorities, one that is valid is enough."""
    for key, path in named(config, *FILES):
        try:
            found = validities_in(Path(path))
        except (OSError, ValueError) as error:
            yield Diagnosis(key, "problem", f"{path}: {error}", "put a certificate in PEM there")
            continue
        pick = max if key.endswith(AUTHORITIES) else min
        begin, end = pick(found, key=lambda validity: validity.end)
        seen = f"{path}: valid from {begin:%Y-%m-%d} until {end:%Y-%m-%d %H:%M} UTC"
        if begin <= now <= end:
            yield of_outcome(key, end - now > WARN, seen, "renew it, and restart the daemon")
        else:
            yield Diagnosis(key, "problem", f"{seen}, not now", "renew it, or correct this machine's clock")
