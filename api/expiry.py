"""Uploads, datasets and models whose time is over go, with their bytes.

What a live job reads stays until that has ended. Safe to run in many processes at once.
"""

import shutil
from pathlib import Path

import structlog

from api import catalog, datasets, upload_files, uploads
from api.db import reading, transaction

log = structlog.get_logger()


def purge() -> int:
    """Delete what has expired, and what who was killed in between left lying.

    Returns how many rows went.
    """
    gone = _purge_uploads()
    with transaction() as session:
        folders = catalog.drop_expired(session)
        files = datasets.drop_expired(session)
    # After the commit: a row must never name what is not there.
    for path in (*folders, *files):
        remove(path)
    with reading() as session:
        strays = list(datasets.strays(session))
        known = uploads.every_id(session)
    for path in strays:
        remove(path)
    upload_files.remove_strays(known)
    return gone + len(folders) + len(files)


def remove(path: Path | None) -> None:
    """Delete a file or a folder of ours. Harmless where there is none."""
    if path is None:
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _purge_uploads() -> int:
    with reading() as session:
        expired = uploads.expired(session)
    gone = 0
    for upload_id in expired:
        with upload_files.locked(upload_id) as nobody_is_at_it:
            if not nobody_is_at_it:
                continue
            with transaction() as session:
                uploads.forget(session, upload_id)
            upload_files.remove(upload_id)
            gone += 1
    return gone
