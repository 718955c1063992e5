"""The walls around a process, each put up for real in a fork of this one."""

import json
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workers import landlock, sandbox
from workers.sandbox import Missing, Walls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has the walls")
ROOT = os.geteuid() == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may pass through, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="precision-walls-") as name:
        outer = Path(name)
        outer.chmod(0o755)
        (outer / "own").mkdir()
        (outer / "model").mkdir()
        (outer / "model" / "weights").write_text("weights")
        (outer / "secret").write_text("secret")
        (outer / "secret").chmod(0o666)
        yield outer


def walls(folder: Path, **more: Any) -> Walls:
    return Walls(folder / "own", (folder / "model",), **more)


def walled(inside: Walls, look: Callable[[], Any]) -> tuple[Missing, Any]:
    """Put the walls up in a fork; return what is missing, and what `look` gives there."""
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            missing = sandbox.close(inside, parent)
            found = json.dumps([missing, look()])
        except BaseException as error:
            found = json.dumps([{}, f"{type(error).__name__}: {error}"])
        os.write(writer, found.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        missing, seen = json.loads(answers.read())
    os.waitpid(child, 0)
    return missing, seen


def trying(deed: Callable[[], object]) -> str:
    try:
        deed()
    except OSError as error:
        return type(error).__name__
    return "done"


def test_only_its_own_files_are_there(folder: Path) -> None:
    secret, own = folder / "secret", folder / "own"

    def look() -> dict[str, str]:
        return {
            "read": trying(secret.read_bytes),
            "write": trying(lambda: secret.write_text("x")),
            "delete": trying(secret.unlink),
            "list": trying(lambda: os.listdir(folder)),
            "change the model": trying(
                lambda: (folder / "model" / "weights").write_text("x")
            ),
            "link": trying(lambda: os.link(secret, own / "link")),
            "through a symlink": trying(
                lambda: (own / "symlink").symlink_to(secret)
                or (own / "symlink").read_bytes()
            ),
            "home": trying(lambda: os.listdir(Path.home())),
            "read the model": trying((folder / "model" / "weights").read_bytes),
            "write its own": trying(lambda: (own / "x").write_text("x")),
            "run a program": trying(lambda: os.spawnv(os.P_WAIT, "/bin/true", ["true"]))
        }  # fmt: skip

    missing, seen = walled(walls(folder), look)
    assert "files" not in missing
    allowed = {name for name, result in seen.items() if result == "done"}
    assert allowed == {"read the model", "write its own", "run a program"}, seen
    assert secret.read_text() == "secret"


def test_another_process_is_neither_read_nor_signalled(folder: Path) -> None:
    parent = os.getpid()

    def look() -> list[str]:
        return [
            trying(lambda: Path(f"/proc/{parent}/environ").read_bytes()),
            trying(lambda: Path(f"/proc/{parent}/mem").open("rb")),
            trying(lambda: os.kill(parent, signal.SIGUSR1)),
        ]

    _, seen = walled(walls(folder), look)
    expected = ["PermissionError"] * 3
    if landlock.version() < 6:
        pytest.skip("this kernel lets processes of one user signal each other")
    assert seen == expected


def test_there_is_no_network_but_a_loopback_of_its_own(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def inside() -> None:
            with socket.create_server(("127.0.0.1", 0)) as own:
                socket.create_connection(own.getsockname(), 2).close()

        def look() -> dict[str, str]:
            return {
                "worker": trying(lambda: socket.create_connection(address, 2)),
                "world": trying(lambda: socket.create_connection(("1.1.1.1", 53), 2)),
                "datagram": trying(
                    lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(
                        b"x", ("1.1.1.1", 53)
                    )
                ),
                "own": trying(inside),
            }

        missing, seen = walled(walls(folder), look)
    if "network" in missing:
        pytest.skip(missing["network"])
    assert seen.pop("own") == "done"
    assert "done" not in seen.values(), seen


def test_powers_are_gone_and_limits_hold(folder: Path) -> None:
    def look() -> dict[str, Any]:
        status = dict(
            line.split(":\t", 1)
            for line in Path("/proc/self/status").read_text().splitlines()
            if ":\t" in line
        )
        descriptors = []
        failed = ""
        try:
            while True:
                descriptors.append(os.dup(0))
        except OSError as error:
            failed = os.strerror(error.errno)
        for each in descriptors:
            os.close(each)
        return {
            "new privileges": status["NoNewPrivs"],
            "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16),
            "umask": status["Umask"],
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "files": failed,
            "data": resource.getrlimit(resource.RLIMIT_DATA)[0],
            "first to go": Path("/proc/self/oom_score_adj").read_text().strip(),
        }

    missing, seen = walled(walls(folder, memory_bytes=2**30), look)
    assert "no_new_privileges" not in missing
    assert seen["new privileges"] == "1"
    reading = 1 << 2  # files of other users, which root's models may be
    assert seen["capabilities"] == (reading if ROOT else 0)
    assert seen["umask"] == "0077"
    assert seen["core"] == [0, 0]
    assert seen["files"] == "Too many open files"
    assert seen["data"] == 2**30 + sandbox.DATA_MARGIN_BYTES
    assert int(seen["first to go"]) >= 500


def test_it_dies_with_its_worker(folder: Path) -> None:
    reader, writer = os.pipe()
    worker = os.fork()
    if worker == 0:
        own = os.getpid()
        if os.fork() == 0:
            sandbox.close(walls(folder), own)
            os.write(writer, str(os.getpid()).encode())
            signal.pause()
        os.close(writer)
        signal.pause()
    os.close(writer)
    assert os.read(reader, 64)  # the walls are up
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    with open(reader, "rb") as answers:
        assert answers.read() == b""  # nobody holds the other end any more


@pytest.mark.skipif(not ROOT, reason="root alone can become somebody else")
def test_root_becomes_the_user_of_the_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_folders_of", lambda package: [])
    monkeypatch.setattr(os, "__file__", str(folder / "model" / "weights"))

    def look() -> Any:
        free = walls(folder).folder / "x"
        return [os.getuid(), os.getgid(), os.getgroups(), trying(lambda: free.write_text("x"))]  # fmt: skip

    missing, seen = walled(walls(folder, user="nobody"), look)
    assert "user" not in missing
    uid, gid, groups, wrote = seen
    assert uid > 0
    assert gid > 0
    assert groups == []
    assert wrote == "done"


@pytest.mark.skipif(not ROOT, reason="root alone can become somebody else")
@pytest.mark.parametrize("user", ["", "no-such-user", "nobody"])
def test_a_user_that_will_not_do_is_named(folder: Path, user: str) -> None:
    (folder / "model").chmod(0o700)

    def look() -> Any:
        return [os.getuid(), trying(lambda: (folder / "own" / "x").write_text("x"))]

    missing, seen = walled(walls(folder, user=user), look)
    assert seen == [0, "done"]
    reason = missing["user"]
    assert "PRECISION_SANDBOX_USER" in reason if not user else user in reason
    if user == "nobody":
        assert "cannot read" in reason


@pytest.mark.skipif(not ROOT, reason="root tries it as somebody else")
def test_without_root_the_same_walls_stand(folder: Path) -> None:
    """Whoever may not leave the network as it is makes a user namespace for it."""
    (folder / "own").chmod(0o777)
    "host".encode("idna")  # loaded while the interpreter's own files can be read
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def look() -> dict[str, Any]:
            return {
                "connect": trying(lambda: socket.create_connection(address, 2)),
                "read": trying((folder / "secret").read_bytes),
                "own": trying(lambda: (folder / "own" / "x").write_text("x")),
                "capabilities": Path("/proc/self/status")
                .read_text()
                .split("CapEff:\t")[1]
                .split("\n")[0],
                "uid": os.getuid(),
            }

        missing, seen = walled_as(65534, walls(folder), look)
    assert isinstance(seen, dict), seen
    assert "files" not in missing
    if "network" not in missing:
        assert seen["connect"] == "ConnectionRefusedError"
    assert seen["read"] == "PermissionError"
    assert seen["own"] == "done"
    assert int(seen["capabilities"], 16) == 0
    assert seen["uid"] == 65534


def walled_as(
    uid: int, inside: Walls, look: Callable[[], Any]
) -> tuple[Missing, dict[str, Any]]:
    """Do the same as another user, from before the walls on."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(uid, uid, uid)
            found = json.dumps(walled(inside, look))
        except BaseException as error:
            found = json.dumps([{}, f"{type(error).__name__}: {error}"])
        os.write(writer, found.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        missing, seen = json.loads(answers.read())
    os.waitpid(child, 0)
    return missing, seen
