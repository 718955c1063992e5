"""With this folder on PYTHONPATH, every Python of a service takes part in a test.

* The processes that compute take `numerics` for what takes torch.
* The clocks of workers are an hour ahead.
* Redis gives a message out again after a second, as it does where a job is longer than
  the visibility timeout, while there is a file `forget` in the data folder.
* The API dies between commit and ring, once, where a file `die` asks for it.
"""

import os
import signal
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

AHEAD_S = 3600.0
COMMAND = " ".join(sys.orig_argv)


class StandIns(MetaPathFinder, Loader):
    """Finds modules that are made by `numerics`, which is loaded before the walls."""

    def __init__(self, numerics) -> None:  # type: ignore[no-untyped-def]
        self._numerics = numerics

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        return ModuleSpec(name, self) if name in self._numerics.STAND_INS else None

    def exec_module(self, module: ModuleType) -> None:
        self._numerics.fill(module)


class Afterwards(MetaPathFinder):
    """Changes modules when they have been loaded."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        change = CHANGES.get(name)
        spec = PathFinder.find_spec(name, path) if change else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def asked(name: str) -> Path:
    """Return the file by which a test asks for something."""
    return Path(os.environ["PRECISION_DATA_DIR"]) / name


def forgetful(module: ModuleType) -> None:
    """Have Redis give messages out again that are a second old, if asked to."""
    module.QoS.visibility_timeout = property(  # type: ignore[attr-defined]
        lambda self: 1.0 if asked("forget").exists() else 3600.0
    )
    module.Channel.unacked_restore_interval = 1  # type: ignore[attr-defined]
    module.Channel.unacked_restore_throttle = 1  # type: ignore[attr-defined]


def mortal(module: ModuleType) -> None:
    """Have the API die before its next bell, where the file `die` says so."""
    ring = module.ring  # type: ignore[attr-defined]

    def ring_or_die(job_id: str, hardware: str = "") -> None:
        if asked("die").exists():
            asked("die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        ring(job_id, hardware)

    module.ring = ring_or_die  # type: ignore[attr-defined]


def skew() -> None:
    """Set the clock of this process ahead, as Python's own code sees it."""
    import datetime
    import time

    real, real_time = datetime.datetime, time.time
    ahead = datetime.timedelta(seconds=AHEAD_S)

    class Kind(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Skewed(real, metaclass=Kind):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return real.now(tz) + ahead

    datetime.datetime = Skewed  # type: ignore[misc]
    time.time = lambda: real_time() + AHEAD_S


CHANGES = {"kombu.transport.redis": forgetful, "api.queue": mortal}

if "workers.child" in COMMAND:
    from tests.faults import numerics

    numerics.PIECES = 1  # so that nobody helps
    sys.meta_path.insert(0, StandIns(numerics))
elif "celery" in COMMAND or "spawn_main" in COMMAND:
    skew()
    del CHANGES["api.queue"]
    sys.meta_path.insert(0, Afterwards())
elif "api.serve" in COMMAND:
    sys.meta_path.insert(0, Afterwards())
