"""Commands about a report that lies here as JSON: is it what was signed, and is it true?

`verify` checks the signature, by the service's public key or by one that was kept.
`reproduce` asks for the same again, and holds every figure against the report.
"""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from api import console, operate
from api.client import Client
from api.operate import DataDir, OperateError
from api.options import AsJson, Key, Url, connect, connected, dumps
from optimizer.compare import Difference, differences
from optimizer.seal import INTEGRITY

SHOWN = 20  # differences; --json has all

ReportFile = Annotated[Path, typer.Argument(metavar="REPORT", help="A report.json.")]


def verify(
    report: ReportFile,
    public_key: Annotated[
        Path | None,
        typer.Option(help="PEM of `precision report-key`; needs no service."),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = operate.DATA_DIR,
) -> None:
    """Check that nobody changed REPORT; exit 1 if somebody did, or nobody can tell."""
    from api import signatures  # cryptography: other commands do without

    try:
        document = signatures.parse(report.read_bytes())
        pem = _kept(public_key) if public_key else _asked(url, key, data_dir)
        said = signatures.verify(document, signatures.read_key(pem))
    except (signatures.Unverified, ValueError) as error:
        if as_json:
            typer.echo(dumps({"verified": False, "reason": str(error)}))
            raise typer.Exit(1) from None
        raise OperateError(f"{report} is not verified: {error}") from None
    if as_json:
        typer.echo(dumps({"verified": True, **said}))
        return
    at = datetime.fromisoformat(said["signed_at"])
    console.out.print(f"{report}: verified", soft_wrap=True)
    console.out.print(f"signed {at:%Y-%m-%d %H:%M} UTC with key {said['key_id']}")
    console.out.print(f"sha256 {said['sha256']}", soft_wrap=True)


def _kept(path: Path) -> str:
    return path.read_text("utf-8")


def _asked(url: str | None, key: str | None, data_dir: Path) -> str:
    with connect(url, key, data_dir) as client:
        return str(client.report_key()["public_key"])


@connected
def report_key(
    client: Client,
    to: Annotated[
        Path | None, typer.Option("--out", help="File to write; else stdout.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Get the public key that checks reports: keep it, it needs no service later."""
    found = client.report_key()
    text = dumps(found) if as_json else str(found["public_key"]).rstrip()
    if to is None:
        typer.echo(text)
    else:
        to.write_text(f"{text}\n", "utf-8")
        console.err.print(f"wrote {to} (key {found['key_id']})", soft_wrap=True)


@connected
def reproduce(
    client: Client,
    report: ReportFile,
    as_json: AsJson = False,
) -> None:
    """Ask for the same as REPORT again; exit 1 if anything that it found differs."""
    from api import signatures

    try:
        first = signatures.parse(report.read_bytes())
        body = _request(first)
    except signatures.Unverified as error:
        raise OperateError(f"{report}: {error}") from None
    _require_model(client, first)
    second = _again(client, body, as_json)
    found = list(differences(first, second))
    figures = [d for d in found if not d.of_surroundings]
    if as_json:
        typer.echo(dumps(_told(second, found)))
    else:
        _show(first, second, found)
    if figures:
        raise typer.Exit(1)


def _request(document: dict[str, Any]) -> dict[str, Any]:
    made = document.get("provenance")
    body = made.get("request") if isinstance(made, dict) else None
    if not isinstance(body, dict):
        raise OperateError("the report does not say what was asked: it is an old one")
    return body


def _require_model(client: Client, document: dict[str, Any]) -> None:
    """Raise where the service has other weights under the report's name, or none."""
    model = document.get("model") or {}
    name, wanted = model.get("name"), model.get("sha256")
    found = next((m for m in client.models() if name in (m["id"], m.get("name"))), None)
    if found is None:
        raise OperateError(
            f"the service has no model {name!r}: add it with precision models add"
        )
    if found["sha256"] != wanted:
        raise OperateError(
            f"the service has another {name!r}: its sha256 is {found['sha256']}, the "
            f"report's {wanted}"
        )


def _again(client: Client, body: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """Run the job and return its report."""
    job = client.optimize(body)
    if as_json:
        job = client.wait(job["id"])
    else:
        console.err.print(f"job {job['id']}")
        with console.live_progress() as show:
            job = client.wait(job["id"], show)
    if job["status"] != "succeeded":
        console.failure(job)
        raise typer.Exit(1)
    return client.report(job["id"])


def _told(second: dict[str, Any], found: list[Difference]) -> dict[str, Any]:
    rows = [
        {
            "pointer": d.pointer,
            "report": d.first,
            "again": d.second,
            "surroundings": d.of_surroundings,
        }
        for d in found
    ]
    return {
        "reproduced": all(d.of_surroundings for d in found),
        "sha256": second.get(INTEGRITY, {}).get("sha256"),
        "differences": rows,
    }


def _show(
    first: dict[str, Any], second: dict[str, Any], found: list[Difference]
) -> None:
    digests = [(r.get(INTEGRITY) or {}).get("sha256") for r in (first, second)]
    figures = [d for d in found if not d.of_surroundings]
    around = sorted({d.path[0] for d in found if d.of_surroundings} - {INTEGRITY})
    if digests[0] and digests[0] == digests[1]:
        console.out.print(
            f"the same, byte by byte: sha256 {digests[0]}", soft_wrap=True
        )
    elif not figures:
        console.out.print("every figure is the same")
    else:
        console.out.print(f"{len(figures)} figures differ:")
        for d in figures[:SHOWN]:
            console.out.print(
                f"  {d.pointer}: {d.first!r}, now {d.second!r}", soft_wrap=True
            )
        if len(figures) > SHOWN:
            console.out.print(f"  and {len(figures) - SHOWN} more (--json has all)")
    if around:
        console.out.print(f"made elsewhere or by another build: {', '.join(around)}")
