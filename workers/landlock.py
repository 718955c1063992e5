"""Landlock: a process gives up every file but those under some folders, for good.

Linux 5.13 or later, without any privilege; a process that did it can neither read the
memory nor the environment of others, and from Linux 6.12 on signal none of them.
"""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

# linux/landlock.h; the numbers are the same on every architecture.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_IOCTL_DEV = 1 << 15
_CONNECT_AND_BIND_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
# Rights that each version of the interface added: the number of them, so far.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP_SINCE, _SCOPES_SINCE = 4, 6
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | _IOCTL_DEV  # and truncate

READ = _EXECUTE | _READ_FILE | _READ_DIR
DEVICES = _READ_FILE | _WRITE_FILE | _READ_DIR | _IOCTL_DEV
EVERYTHING = (1 << 16) - 1

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Return the interface's version. Raises OSError where the kernel has none."""
    return _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))


def restrict(allowed: Iterable[tuple[Path, int]], *, tcp: bool) -> None:
    """Leave this thread these folders and files, with some rights; others are closed.

    Without `tcp`, no connection over it can be made, where the kernel knows how. A path
    that does not exist is left out. Raises OSError where the kernel refuses.
    """
    found = version()
    handled = (1 << _RIGHTS[min(found, max(_RIGHTS))]) - 1
    rules = _Ruleset(
        files=handled,
        net=_CONNECT_AND_BIND_TCP if found >= _TCP_SINCE and not tcp else 0,
        scoped=_ABSTRACT_SOCKETS_AND_SIGNALS if found >= _SCOPES_SINCE else 0,
    )
    size = ctypes.c_size_t(ctypes.sizeof(rules))  # what is 0 may be unknown
    ruleset = _call(_CREATE, ctypes.byref(rules), size, ctypes.c_uint32(0))
    try:
        for path, rights in allowed:
            _allow(ruleset, path, rights & handled)
        _call(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not path.is_dir():
            rights &= _OF_FILES
        rule = _Beneath(rights, opened)
        beneath = ctypes.c_int(1)
        _call(
            _ADD, ctypes.c_int(ruleset), beneath, ctypes.byref(rule), ctypes.c_uint32(0)
        )
    finally:
        os.close(opened)


def _call(number: int, *arguments: object) -> int:
    result = int(_LIBC.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
