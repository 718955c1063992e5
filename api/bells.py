"""Rings after the answer: no caller waits for the broker, and many rings become one.

A worker that starts on a job rings for the next one itself (`workers.tasks`), so one
bell says enough of any number of jobs. What is lost with this process, the sweep rings.
"""

import threading
import time

from api import queue

REST_S = 0.05  # between two rings: under load, they would take time from requests


class Ringer:
    """A thread that rings once for each queue, whatever came in while it rang or
    rested.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, str]] = {}  # queue to job and device
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def ring(self, job_id: str, hardware: str) -> None:
        """Ring for a job soon, and return at once."""
        with self._changed:
            self._waiting[queue.name(hardware)] = job_id, hardware
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ringer", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                taken, self._waiting = self._waiting, {}
            for job_id, hardware in taken.values():
                queue.ring(job_id, hardware)
            time.sleep(REST_S)


_ringer = Ringer()
ring_soon = _ringer.ring
