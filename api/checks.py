"""What happens to an upload once it is complete, beside the request that said so.

A check survives the process that began it: whoever holds the upload's lock goes on,
at the next start or when the client says `complete` again.
"""

import contextvars
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import structlog
from sqlalchemy.orm import Session

from api import audit, catalog, datasets, db, inspection, upload_files, uploads
from api.errors import APIError, Invalid
from api.models import Upload, UploadState

AT_ONCE = 2  # of one process: the disk is what they wait for

log = structlog.get_logger()
_running: dict[str, "Future[None]"] = {}
_guard = threading.Lock()
_slots = threading.Semaphore(AT_ONCE)


def start(upload_id: str) -> "Future[None]":
    """Check an upload in a thread; done when its row says what came of it."""
    with _guard:
        running = _running.get(upload_id)
        if running is None:
            running = _running[upload_id] = Future()
            work = contextvars.copy_context().run
            threading.Thread(
                target=work, args=(_run, upload_id, running), name="check", daemon=True
            ).start()
        return running


def resume() -> None:
    """Go on with what a process that ended was at."""
    with db.reading() as session:
        waiting = uploads.under_check(session)
    for upload_id in waiting:
        start(upload_id)


def _run(upload_id: str, running: "Future[None]") -> None:
    try:
        with _slots, upload_files.locked(upload_id) as nobody_is_at_it:
            if nobody_is_at_it:
                _check(upload_id)
    except BaseException as error:  # a thread has nobody to tell but who waits
        log.exception("check_failed", upload_id=upload_id)
        running.set_exception(error)
    else:
        running.set_result(None)
    finally:
        with _guard:
            del _running[upload_id]


def _check(upload_id: str) -> None:
    with db.reading() as session:
        upload = session.get(Upload, upload_id)
    if upload is None or upload.state is not UploadState.CHECKING:
        return
    steps: dict[str, Callable[[Upload], None]] = {
        "model": _model,
        uploads.HUB: _model,
        "folder": _folder,
        "dataset": _dataset,
    }
    try:
        with upload_files.room():
            steps[upload.kind](upload)
    except APIError as error:
        if error.status >= 500:
            raise  # our fault: it may be tried again
        log.info("upload_refused", upload_id=upload_id, code=error.code)
        with db.transaction() as session:
            uploads.fail(session, upload_id, error)
        shutil.rmtree(upload_files.model_folder(upload.tenant_id, upload_id), True)
    upload_files.remove(upload_id)


def _model(upload: Upload) -> None:
    target = upload_files.model_folder(upload.tenant_id, upload.id)
    if target.exists():  # somebody was killed right after the move
        found = inspection.model(target)
    else:
        files = _assembled(upload)
        found = inspection.model(files)
        upload_files.publish(files, target)
    weights = catalog.found_at(target, upload.name, found)
    with db.transaction() as session:
        catalog.register_upload(
            session, upload.tenant_id, upload.id, weights, upload.keep_s
        )
        _finish(session, upload, "model.created", sha256=weights.sha256)


def _folder(upload: Upload) -> None:
    weights = catalog.weights_at(Path(upload.files[0]["path"]), "/path")
    with db.transaction() as session:
        catalog.register(session, upload.tenant_id, upload.name, weights)
        _finish(session, upload, "model.created", sha256=weights.sha256)


def _dataset(upload: Upload) -> None:
    file = _assembled(upload) / upload.files[0]["path"]
    kept = inspection.dataset(file, file.with_name("kept.jsonl"))
    with db.transaction() as session:
        datasets.require_new_name(session, upload.tenant_id, upload.name)
        datasets.keep(
            session, upload.tenant_id, upload.name, kept, upload.keep_s, upload.id
        )
        _finish(session, upload, "dataset.created", sha256=kept.sha256)


def _assembled(upload: Upload) -> Path:
    """Return the folder of files. Raises Invalid where one is not as it was said."""
    with db.reading() as session:
        there = uploads.parts(session, upload.id)
    digests = {number: part.sha256 for number, part in there.items()}
    files = upload_files.assemble(upload.id, upload.files, upload.part_bytes, digests)
    for file in upload.files:
        said = file.get("sha256")
        if said and said != (found := upload_files.sha256(files / file["path"])):
            detail = f"{file['path']} has the sha256 {found}, not {said}: send it again"
            raise Invalid("/files", detail, "digest_mismatch")
    return files


def _finish(session: Session, upload: Upload, action: str, **details: str) -> None:
    uploads.finish(session, upload)
    actor = upload.created_by or "unknown"
    audit.record(
        session, upload.tenant_id, actor, action, upload.id, name=upload.name, **details
    )
