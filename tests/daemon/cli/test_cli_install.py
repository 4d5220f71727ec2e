"""`foretick install`: what it writes below a root, what it keeps, and how it is undone."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemon.cli import install
from daemon.cli.install import command
from daemon.config.load import load_config
from daemon.install.planned import EXAMPLES, InstallError, usable

PROGRAM = "/opt/foretick/bin/foretick"
CONFIG, UNIT, TEMPLATE = (
    "etc/foretick/foretick.toml",
    "etc/systemd/system/foretick.service",
    "etc/systemd/system/foretick@.service",
)
OTHERS = {
    "etc/foretick/credentials.conf",
    "etc/foretick/installed.json",
    "etc/sysusers.d/foretick.conf",
}
SOCKETS = {f"etc/systemd/system/foretick-{name}.socket" for name in ("http", "query")}
FILES = {CONFIG, UNIT} | SOCKETS | OTHERS
Install = Callable[..., Result]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def run(root: Path) -> Install:
    """A function that runs the command below ``root`` with more options."""

    def run(*options: str, program: str = PROGRAM) -> Result:
        return CliRunner().invoke(command, ["--root", str(root), "--program", program, *options])

    return run


def there(root: Path) -> dict[str, bytes | Path]:
    """What files and links hold, by path below the root, and directories with nothing in them: NAME/."""
    found: dict[str, bytes | Path] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if not path.is_dir():
            found[name] = path.readlink() if path.is_symlink() else path.read_bytes()
        elif not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def edit(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path.read_text()


def test_unit_configuration_and_a_directory_for_secrets_are_written(root: Path, run: Install) -> None:
    done = run(program="/srv/desk/bin/foretick")
    assert done.exit_code == 0, done.output
    assert there(root).keys() == FILES | {"etc/foretick/credentials/"}
    assert "\nExecStart=/srv/desk/bin/foretick run " in (root / UNIT).read_text()
    assert PROGRAM not in (root / UNIT).read_text()
    assert mode(root / "etc/foretick/credentials") == 0o700
    assert {mode(root / name) for name in FILES} == {0o644}
    for name in FILES - {"etc/foretick/installed.json"}:
        assert f"written   /{name}\n" in done.output


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_configuration_is_valid_and_explained(root: Path, run: Install, example: str) -> None:
    assert run("--example", example).exit_code == 0
    assert load_config(root / CONFIG, environment={}).sessions
    assert (root / CONFIG).read_text().startswith("# ")


def test_a_dry_run_writes_nothing(root: Path, run: Install) -> None:
    done = run("--dry-run")
    assert done.exit_code == 0
    assert f"written   /{UNIT}\n" in done.stdout
    assert "nothing was done" in done.stdout
    assert there(root) == {}
    run()
    before = there(root)
    assert f"removed   /{UNIT}\n" in run("--undo", "--dry-run").stdout
    assert there(root) == before


def test_another_run_changes_nothing_and_says_so(root: Path, run: Install) -> None:
    run("--example", "zeromq")
    before = {name: (root / name).stat().st_mtime_ns for name in there(root)}
    done = run()
    assert done.exit_code == 0
    assert done.stdout.endswith("nothing is changed\n")
    assert "written" not in done.stdout
    assert {name: (root / name).stat().st_mtime_ns for name in there(root)} == before


def test_a_program_that_moved_is_written_into_a_unit_that_is_ours(root: Path, run: Install) -> None:
    run()
    done = run(program="/srv/bin/foretick")
    assert f"updated   /{UNIT}\n" in done.stdout
    assert "ExecStart=/srv/bin/foretick run " in (root / UNIT).read_text()
    assert run("--undo").exit_code == 0
    assert there(root) == {}


def test_a_changed_unit_is_shown_and_kept_unless_forced(root: Path, run: Install) -> None:
    run()
    ours = (root / UNIT).read_text()
    changed = edit(root / UNIT, "WatchdogSec=20", "WatchdogSec=90")
    done = run()
    assert done.exit_code == 0
    assert (root / UNIT).read_text() == changed
    assert "\n-WatchdogSec=90\n+WatchdogSec=20\n" in done.stdout
    assert done.stdout.endswith("nothing is changed\n")
    assert f"updated   /{UNIT}\n" in run("--force").stdout
    assert (root / UNIT).read_text() == ours


def test_a_changed_configuration_is_never_replaced(root: Path, run: Install) -> None:
    run()
    changed = edit(root / CONFIG, "btcusdt", "btc")
    assert f"kept      /{CONFIG}: " in run("--force").stdout
    assert (root / CONFIG).read_text() == changed


def test_files_that_were_there_before_are_not_ours(root: Path, run: Install) -> None:
    run()
    before = there(root)
    (root / "etc/foretick/installed.json").unlink()
    assert run().stdout.endswith("nothing is changed\n")
    done = run("--undo")
    assert done.exit_code == 2
    assert there(root).keys() == before.keys() - {"etc/foretick/installed.json"}


def test_undo_leaves_what_was_there_before_and_nothing_else(root: Path, run: Install) -> None:
    others = root / "etc/systemd/system/other.service"
    others.parent.mkdir(parents=True)
    others.write_text("[Service]\n")
    run()
    run("--instance")
    assert {UNIT, TEMPLATE} < there(root).keys()
    done = run("--undo")
    assert done.exit_code == 0
    assert there(root) == {"etc/systemd/system/other.service": b"[Service]\n"}
    assert not (root / "etc/foretick").exists()


def test_undo_keeps_what_was_changed_and_names_it(root: Path, run: Install) -> None:
    run()
    edit(root / CONFIG, "btcusdt", "btc")
    secret = root / "etc/foretick/credentials/kafka"
    secret.write_text("desk\ntick\n")
    done = run("--undo")
    assert there(root).keys() == {CONFIG, "etc/foretick/credentials/kafka"}
    assert f"kept      /{CONFIG}: it was changed\n" in done.stdout
    assert "kept      /etc/foretick/credentials: it holds /etc/foretick/credentials/kafka\n" in done.stdout
    assert f"removed   /{UNIT}\n" in done.stdout


def test_undo_goes_on_where_files_are_missing(root: Path, run: Install) -> None:
    run()
    (root / UNIT).unlink()
    (root / "etc/foretick/credentials").rmdir()
    assert run("--undo").exit_code == 0
    assert there(root) == {}


def test_an_enabled_unit_is_disabled_before_it_is_removed(root: Path, run: Install) -> None:
    run("--instance")
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    (wants / "foretick@desk-1.service").symlink_to(f"/{TEMPLATE}")
    before = there(root)
    done = run("--undo")
    assert done.exit_code == 2
    assert "systemctl disable --now foretick@desk-1" in done.stderr
    assert there(root) == before


def test_a_directory_that_others_can_open_is_named(root: Path, run: Install) -> None:
    run()
    (root / "etc/foretick/credentials").chmod(0o755)
    assert "chmod 0700 /etc/foretick/credentials" in run().stdout


def refused(done: Result, *words: str) -> bool:
    """Whether it ended with status 2 and one sentence that has these words."""
    return (
        done.exit_code == 2
        and done.stdout == ""
        and done.stderr.count("\n") == 1
        and all(word in done.stderr for word in words)
    )


def test_a_file_in_place_of_a_directory_is_refused(root: Path, run: Install) -> None:
    (root / "etc").write_text("")
    assert refused(run(), "etc", "Not a directory")
    (root / "etc").unlink()
    (root / "etc/foretick").mkdir(parents=True)
    (root / "etc/foretick/credentials").write_text("")
    assert refused(run(), "/etc/foretick/credentials is a file")
    assert there(root) == {"etc/foretick/credentials": b""}


def test_a_directory_in_place_of_a_file_is_refused(root: Path, run: Install) -> None:
    (root / UNIT).mkdir(parents=True)
    assert refused(run(), "foretick.service", "Is a directory")


def test_a_link_that_leads_out_of_the_root_is_refused(root: Path, tmp_path: Path, run: Install) -> None:
    """An absolute link in an image is meant below its root, and means this machine from outside."""
    (outside := tmp_path / "outside").mkdir()
    (root / "etc").mkdir()
    (root / "etc/systemd").symlink_to(outside)
    before = there(root)
    assert refused(run(), "/etc/systemd/system/foretick.service", f"out of {root}", str(outside))
    assert (there(root), there(outside)) == (before, {})


def test_a_link_within_the_root_is_followed(root: Path, run: Install) -> None:
    (root / "usr/lib/systemd").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc/systemd").symlink_to("../usr/lib/systemd")
    assert run().exit_code == 0
    assert (root / "usr/lib/systemd/system/foretick.service").is_file()
    assert run("--undo").exit_code == 0
    assert (root / "etc/systemd").is_symlink()
    assert there(root).keys() == {"etc/systemd/", "usr/lib/systemd/"}


@pytest.mark.parametrize(
    ("link", "to", "words"),
    [
        (UNIT, "/dev/null", ("foretick.service is masked", "systemctl unmask foretick.service")),
        (UNIT, "/etc/hostname", (f"/{UNIT} is a link to /etc/hostname",)),
        (CONFIG, "nothing", (f"/{CONFIG} is a link to nothing",)),
        ("etc/foretick", "/etc", ("out of",)),
        ("etc/foretick/credentials", "/etc", ("/etc/foretick/credentials is a link to /etc",)),
        ("etc/systemd", "nothing", ("etc/systemd is a link to nothing, which is not there",)),
        ("etc/systemd", "systemd", ("etc/systemd is a link to systemd",)),
    ],
)
def test_a_link_in_place_of_a_file_or_directory_is_refused(
    root: Path, run: Install, link: str, to: str, words: tuple[str, ...]
) -> None:
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(to)
    before = there(root)
    assert refused(run("--force"), *words)
    assert there(root) == before


def test_undo_refuses_links_too(root: Path, tmp_path: Path, run: Install) -> None:
    run()
    (root / "etc/systemd").rename(outside := tmp_path / "outside")
    (root / "etc/systemd").symlink_to(outside)
    before = there(root), there(outside)
    assert refused(run("--undo"), "out of", str(outside))
    assert (there(root), there(outside)) == before
    (root / "etc/systemd").unlink()
    outside.rename(root / "etc/systemd")
    (root / UNIT).unlink()
    (root / UNIT).symlink_to("/dev/null")
    before = there(root), {}
    assert refused(run("--undo"), "foretick.service is masked")
    assert there(root) == before[0]


def test_a_manifest_that_cannot_be_read_is_refused(root: Path, run: Install) -> None:
    run()
    (root / "etc/foretick/installed.json").write_text("{")
    assert refused(run(), "/etc/foretick/installed.json")


@pytest.mark.parametrize(
    ("error", "hint"), [(PermissionError(13, "Permission denied"), "root"), (OSError(30, "Read-only"), "")]
)
def test_what_cannot_be_written_is_named(
    root: Path, run: Install, monkeypatch: pytest.MonkeyPatch, error: OSError, hint: str
) -> None:
    """As for a user who is not root, or on a file system that is read-only."""

    def mkdir(path: Path, *_: object, **__: object) -> None:
        raise type(error)(*error.args, str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert refused(run(), str(root / "etc"), str(error.strerror), hint)
    assert there(root) == {}


def test_without_systemd_it_needs_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_SYSTEMD_RUNS", tmp_path / "none")
    assert refused(CliRunner().invoke(command, []), "systemd", "--root")


@pytest.mark.parametrize(
    "path", ["/home/desk/.local/bin/foretick", "/root/foretick", "/tmp/venv/bin/foretick"]
)
def test_a_program_that_units_do_not_see_is_refused(root: Path, run: Install, path: str) -> None:
    assert refused(run(program=path), path, "/opt/foretick")
    assert there(root) == {}


@pytest.mark.parametrize(
    "path", ["bin/foretick", "/opt/a b/foretick", "/opt/50%/foretick", "/opt/$x", '/opt/"']
)
def test_a_program_whose_path_needs_quotes_in_a_unit_is_refused(path: str) -> None:
    with pytest.raises(InstallError, match="plain absolute path"):
        usable(Path(path))


def test_the_program_is_the_one_of_this_environment(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not there is named; where tests run, a unit may not see it."""
    monkeypatch.setattr(install.sysconfig, "get_path", lambda _: str(tmp_path))
    options = ["--root", str(root)]
    assert refused(CliRunner().invoke(command, options), f"{tmp_path}/foretick is not there", "--program")
    (tmp_path / "foretick").touch()
    monkeypatch.setattr(install, "usable", lambda path: path)
    assert CliRunner().invoke(command, options).exit_code == 0
    assert f"\nExecStart={tmp_path}/foretick run " in (root / UNIT).read_text()
