"""A real schema registry for tests, Apicurio on loopback with Confluent's API; and Java's serializers."""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kit.archives import unpack
from tests.kit.kafka import REPOSITORY, free_ports
from tests.kit.programs import need, unavailable

APP = "io.apicurio:apicurio-registry-app:3.0.9:tar.gz:all"
"""The archive has all that it needs; it is fetched by name, for its parent is not published."""
POM = REPOSITORY / "tests" / "registry" / "pom.xml"
JARS = REPOSITORY / ".cache" / "registry"
READY_S = 90.0
_JAVA = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def resolve() -> Path:
    """Folder of the registry (``app``) and of the serializers (``jars``), fetched by Maven once."""
    digest = hashlib.sha256(POM.read_bytes() + APP.encode()).hexdigest()[:12]
    ready = JARS / digest
    if ready.is_dir():
        return ready
    JARS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=JARS) as fetching:
        whole = Path(fetching, "whole")
        _maven("dependency:copy", f"-Dartifact={APP}", f"-DoutputDirectory={fetching}/archive")
        jars = ("-DincludeScope=runtime", f"-DoutputDirectory={whole}/jars")
        _maven("-f", str(POM), "dependency:copy-dependencies", *jars)
        (archive,) = Path(fetching, "archive").iterdir()
        unpack(archive, whole / "app")
        try:
            os.replace(whole, ready)  # whole or not at all
        except OSError:
            if not ready.is_dir():  # else another process was first
                raise
    return ready


def _maven(*arguments: str) -> None:
    done = subprocess.run(
        [need("mvn"), "-q", "-B", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        unavailable(f"Maven could not fetch the schema registry: {(done.stdout + done.stderr)[-800:]}")


class RegistryServer:
    """A registry that keeps everything in memory. ``url``: of Confluent's API; ``native``: of its own."""

    def __init__(self) -> None:
        self._home, self._folder = resolve(), Path(tempfile.mkdtemp(prefix="registry"))
        (self._port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}/apis/ccompat/v7"
        self.native = f"http://127.0.0.1:{self._port}/apis/registry/v3"

    def __enter__(self) -> Self:
        settings = {"http.host": "127.0.0.1", "http.port": self._port, "log.level": "WARN"}
        (runner,) = (self._home / "app").glob("*-runner.jar")
        options = [f"-Dquarkus.{name}={value}" for name, value in settings.items()]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [need("java"), *_JAVA, *options, "-jar", str(runner)],
                cwd=self._folder, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            self._wait_ready(self._process)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/subjects", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                log = (self._folder / "log").read_text(errors="replace")[-2000:]
                assert process.poll() is None, log
                assert time.monotonic() < deadline, log
                time.sleep(0.2)

    def run_script(self, script: str, *arguments: str) -> str:
        """What a script in Groovy prints, with Java's serializers at hand."""
        path = self._folder / "script.groovy"
        path.write_text(script)
        command = [need("java"), *_JAVA, "-cp", f"{self._home}/jars/*", "groovy.ui.GroovyMain"]
        done = subprocess.run(
            [*command, str(path), *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert not done.returncode, (done.stdout + done.stderr)[-3000:]
        return done.stdout
