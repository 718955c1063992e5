"""The walls around the process that computes. It puts them up itself, before anything else.

A model is somebody's upload: should one take this process over, there is no network to
call out by, nothing to read but what the job needs, and nowhere to write but in a folder
that goes with the job. Each measure is independent of the others; a machine that does
not allow one leaves the rest (`try`), or the job is not run there (`require`).
"""

import contextlib
import ctypes
import errno
import os
import pwd
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fcntl import ioctl
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from api.supervise import die_with
from workers import landlock

FILE_BYTES = 256 * 2**30  # of one file
FILES = 4096  # open at once
_CUDA = Path("/dev/nvidiactl")  # its driver takes more addresses than memory
TASKS = 4096  # processes and threads of the user
DATA_MARGIN_BYTES = 2 * 2**30  # beyond the job's memory: what is taken and never used

_NO_NEW_PRIVILEGES, _DROP_BOUNDING, _SET_DUMPABLE = 38, 24, 4  # linux/prctl.h
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # linux/sched.h
_READ_SEARCH = 2  # linux/capability.h
_CAPABILITIES_V3 = 0x20080522
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # linux/sockios.h, of an interface
# What programs read wherever they run. Secrets lie in /run, /var, /home and /root.
_SYSTEM = [
    "/usr",
    "/lib",
    "/lib64",
    "/lib32",
    "/bin",
    "/sbin",
    "/etc",
    "/opt",
    "/proc",
    "/sys",
    "/nix/store",
]

_LIBC = ctypes.CDLL(None, use_errno=True)

Missing = dict[str, str]
"""What could not be done, by measure, and why."""


class NotAllowed(Exception):
    """The kernel, or the machine's set-up, does not allow a measure."""


@dataclass(frozen=True, slots=True)
class Walls:
    """What one job's process is left with."""

    folder: Path  # its own, to read and write
    readable: tuple[Path, ...]  # the model, the data
    memory_bytes: int = 0  # 0: no limit
    user: str = ""  # whom to become, where it is root; "": nobody


def close(walls: Walls, parent: int) -> Missing:
    """Put the walls up around this process, which has one thread and dies with `parent`.

    Returns what this machine did not allow.
    """
    os.umask(0o077)
    _limit(walls.memory_bytes)
    with contextlib.suppress(OSError):  # where memory is short, this one goes first
        Path("/proc/self/oom_score_adj").write_text("500")
    if sys.platform != "linux":
        return {"sandbox": f"{sys.platform} has no such walls"}
    missing: Missing = {}

    def attempt(name: str, measure: Callable[[], None]) -> bool:
        try:
            measure()
        except (OSError, NotAllowed) as error:
            missing[name] = str(error)
        return name not in missing

    attempt("no_new_privileges", lambda: _prctl(_NO_NEW_PRIVILEGES, 1))
    alone = attempt("network", _leave_network)
    attempt("user", lambda: _become(walls))
    attempt("files", lambda: _leave_files(walls, tcp=alone))
    attempt("capabilities", _drop_capabilities)
    die_with(parent)  # changing who we are made the kernel forget it
    return missing


def _limit(memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_NPROC: TASKS,
        resource.RLIMIT_FSIZE: FILE_BYTES,
    }
    if memory_bytes and sys.platform == "linux" and not _CUDA.exists():
        limits[resource.RLIMIT_DATA] = memory_bytes + DATA_MARGIN_BYTES
    for kind, limit in limits.items():
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most)
        resource.setrlimit(kind, (limit, limit))


def _leave_network() -> None:
    """Go to a network with nothing in it but a loopback of our own."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        _libc("unshare", _NEW_NET)
    except PermissionError:
        _libc("unshare", _NEW_USER | _NEW_NET)
        _prctl(_SET_DUMPABLE, 1)  # else what is in /proc/self is root's
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _raise_loopback()


def _raise_loopback() -> None:
    name = struct.pack("16sH14x", b"lo", 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = struct.unpack("16sH14x", ioctl(any_socket, _GET_FLAGS, name))[1]
        ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _become(walls: Walls) -> None:
    """Become another user for good, if that one can read what the job needs."""
    if os.geteuid() != 0:
        return  # there is no one less to become
    if not walls.user:
        raise NotAllowed("the worker is root, and PRECISION_SANDBOX_USER names nobody")
    try:
        user = pwd.getpwnam(walls.user)
    except KeyError:
        raise NotAllowed(f"there is no user {walls.user!r}") from None
    _give(walls.folder, user.pw_uid, user.pw_gid)
    needed = list(_needed(walls))
    os.setgroups([])
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    closed = [path for path in needed if not _opens(path)]
    os.seteuid(0)
    os.setegid(0)
    if closed:
        _give(walls.folder, 0, 0)
        raise NotAllowed(f"{walls.user} cannot read {closed[0]}")
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)


def _give(folder: Path, uid: int, gid: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, gid, follow_symlinks=False)


def _opens(path: Path) -> bool:
    rights = os.R_OK | (os.X_OK if os.path.isdir(path) else 0)
    return os.access(path, rights, effective_ids=True)


def _needed(walls: Walls) -> Iterable[Path]:
    """Yield what the process will certainly read."""
    yield walls.folder
    yield Path(os.__file__)
    for package in ("torch", "optimizer"):
        yield from _folders_of(package)
    yield from walls.readable


def _folders_of(package: str) -> list[Path]:
    spec = find_spec(package)
    return [Path(p) for p in (spec and spec.submodule_search_locations) or ()]


def _leave_files(walls: Walls, *, tcp: bool) -> None:
    allowed = [(path, landlock.READ) for path in (*_code(), *walls.readable)]
    allowed += [(Path("/dev"), landlock.DEVICES), (walls.folder, landlock.EVERYTHING)]
    landlock.restrict(allowed, tcp=tcp)
    if not tcp:
        raise NotAllowed("no network of its own; connections over TCP alone are closed")


def _code() -> list[Path]:
    """Return what is read by programs, and the packages that this one is made of.

    A folder that packages were installed from in place may hold anything beside them.
    """
    libraries = [p for p in map(Path, sys.path) if p.name != "" and _installed(p)]
    search = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    own = [*_folders_of("optimizer"), *_folders_of("workers"), *_folders_of("api")]
    prefixes = [Path(sys.prefix), Path(sys.base_prefix)]
    system = map(Path, [*_SYSTEM, *filter(None, search)])
    return [*system, *prefixes, *libraries, *own]


def _installed(path: Path) -> bool:
    return path.name in ("site-packages", "dist-packages", "lib-dynload")


def _drop_capabilities() -> None:
    """Give up what makes root more than a user, but reading files of others."""
    kept = 1 << _READ_SEARCH if os.geteuid() == 0 else 0
    for number in range(64):
        if not kept >> number & 1 and not _drop_bounding(number):
            break  # the kernel knows no more
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    low = kept & 0xFFFFFFFF
    sets = (ctypes.c_uint32 * 6)(
        low, low, 0, 0, 0, 0
    )  # effective, permitted, inherited
    _libc("capset", header, sets)


def _drop_bounding(number: int) -> bool:
    try:
        _prctl(_DROP_BOUNDING, number)
    except OSError as error:
        return error.errno == errno.EPERM  # without privileges there is nothing to drop
    return True


def _prctl(option: int, value: int) -> None:
    _libc("prctl", option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def _libc(name: str, *arguments: Any) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
