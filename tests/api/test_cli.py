"""The command line against the real API; only the numerics are replaced."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from types import ModuleType
from typing import Any

import pytest
import structlog
import uvicorn

from api import console, queue
from api.app import create_app
from api.cli import main, seconds
from optimizer.errors import DatasetError
from tests.optimizer.example_document import example_document
from tests.service import tiny_model
from tests.workers import in_thread
from workers.tasks import run_job

Run = Callable[..., tuple[int, str, str]]
ASK = ("optimize", "tiny", "--hardware", "h100")


@pytest.fixture
def precision(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run a command as a shell would; gives exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What stands in the place of `optimizer.run`; its answer meets the SLA."""
    run, torch = ModuleType("optimizer.run"), ModuleType("torch")
    run.optimize = lambda *known: answer("sla_met")  # type: ignore[attr-defined]
    torch.set_num_threads = lambda count: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optimizer.run", run)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return run


def answer(outcome: str) -> dict[str, Any]:
    document = example_document(layers=2)
    ways = ["latency_sla 0.4 ms or more"] if outcome == "sla_not_met" else []
    verdict = {**document["verdict"], "outcome": outcome, "would_meet": ways}
    return {**document, "verdict": verdict}


@pytest.fixture
def site(
    sqlite: Path, key: str, optimizer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Serve the API on a port and run what its bells ring for; gives the data folder."""
    tiny_model(sqlite / "models" / "tiny")
    in_thread.use(monkeypatch)
    rung: Queue[str | None] = Queue()
    monkeypatch.setattr(queue, "ring", rung.put)
    worker = threading.Thread(target=lambda: [run_job(i) for i in iter(rung.get, None)])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error"))
    log = (sqlite / "api.log").open("w")  # stdout is what we test
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(log))
    http = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    for thread in (worker, http):
        thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    (sqlite / "address").write_text(json.dumps({"url": url}))
    (sqlite / "api_key").write_text(key + "\n")
    yield sqlite
    server.should_exit = True
    rung.put(None)
    for thread in (worker, http):
        thread.join()
    listener.close()
    structlog.reset_defaults()
    log.close()


def job_id(printed: str) -> str:
    return next(w for w in printed.split() if w.startswith("job_"))


# -- optimize --------------------------------------------------------------------


def test_a_met_sla_exits_0_and_shows_the_stack(site: Path, precision: Run) -> None:
    code, out, err = precision(*ASK, "--sla", "20ms", "--data", "web_text")
    assert code == 0, err
    for component in answer("sla_met")["precision_stack"]:
        assert component in out
    assert answer("sla_met")["verdict"]["sentence"].split(".")[0][:40] in out
    assert "precision report job_" in out


def test_a_missed_sla_exits_3_and_says_what_would_meet_it(
    site: Path, precision: Run, optimizer: Any
) -> None:
    optimizer.optimize = lambda *known: answer("sla_not_met")
    code, out, _ = precision(*ASK, "--sla", "1us")
    assert code == 3
    assert "latency_sla 0.4 ms or more" in out


def test_a_failed_job_exits_1_and_says_why(
    site: Path, precision: Run, optimizer: Any
) -> None:
    def fail(*known: object) -> None:
        raise DatasetError("3 samples, 16 are needed")

    optimizer.optimize = fail
    code, out, err = precision(*ASK)
    assert (code, out) == (1, "")
    assert "3 samples, 16 are needed" in err
    assert "calibration_data_empty" in err


def test_json_is_all_that_stdout_holds(site: Path, precision: Run) -> None:
    code, out, _ = precision(*ASK, "--json")
    job = json.loads(out)
    assert (code, job["status"], job["outcome"]) == (0, "succeeded", "sla_met")


def test_no_wait_prints_the_id_alone(site: Path, precision: Run) -> None:
    code, out, _ = precision(*ASK, "--no-wait")
    assert code == 0
    assert out.strip() == job_id(out)


def test_the_options_become_the_request(site: Path, precision: Run) -> None:
    options = ("--sla", "20ms", "--first-token", "0.3", "--task", "code")
    sizes = ("--batch-size", "4", "--prompt-tokens", "9", "--output-tokens", "8")
    more = ("--data", "math", "--rounding", "compensated", "--tensor-parallel", "2")
    _, out, _ = precision(
        *ASK, *options, *sizes, *more, "--export", "torchao", "--json"
    )
    request = json.loads(out)["request"]
    target = {"per_token_s": 0.02, "first_token_s": 0.3, "percentile": 0.5}
    assert request["latency_sla"] == target
    assert request["workload"] == {
        "batch_size": 4,
        "prompt_tokens": 9,
        "output_tokens": 8,
        "tensor_parallel": 2,
        "cuda_graphs": True,
    }
    assert (request["task"], request["data_distribution"]) == ("code", "math")
    assert request["rounding"] == "compensated"
    assert request["exports"] == ["torchao"]


def test_a_file_of_json_lines_is_uploaded_under_its_name(
    site: Path, precision: Run, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": f"Line {i}: " + "words " * 60}) for i in range(64)]
    path = tmp_path / "my tickets.jsonl"
    path.write_text("\n".join(lines))
    code, out, err = precision(*ASK, "--data", str(path), "--json")
    assert code == 0, err
    sent = json.loads(out)["request"]["data_distribution"]
    assert sent.startswith("my-tickets-")


def test_an_unknown_name_is_refused_with_what_there_is(
    site: Path, precision: Run
) -> None:
    code, out, err = precision("optimize", "qwen2-7b", "--hardware", "h100")
    assert (code, out) == (1, "")
    assert "qwen2-7b" in err
    assert "tiny" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("20ms", 0.02), ("0.02", 0.02), ("0.02s", 0.02), ("500us", 5e-4), ("1e-3", 1e-3)],
)
def test_times_are_read_with_their_unit(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", ["0", "-1ms", "fast", "20 min", "nan", "inf", "1..2s"])
def test_a_time_that_is_none_is_a_usage_error(
    site: Path, precision: Run, text: str
) -> None:
    code, _, err = precision(*ASK, f"--sla={text}")
    assert code == 2
    assert text in err
    assert "--sla" in err


# -- the rest --------------------------------------------------------------------


def test_jobs_are_listed_shown_and_explained(site: Path, precision: Run) -> None:
    _, out, _ = precision(*ASK, "--json")
    job = json.loads(out)
    _, listed, _ = precision("jobs", "list")
    assert job["id"] in listed
    assert "sla_met" in listed
    _, shown, _ = precision("jobs", "get", job["id"])
    assert "succeeded" in shown
    _, events, _ = precision("jobs", "events", job["id"], "--json")
    found = [json.loads(line) for line in events.splitlines()]
    assert [e["seq"] for e in found] == list(range(1, len(found) + 1))
    assert found[-1]["type"] == "job.succeeded"
    _, readable, _ = precision("jobs", "events", job["id"])
    assert len(readable.splitlines()) == len(found)


def test_a_cancel_of_a_finished_job_changes_nothing(site: Path, precision: Run) -> None:
    _, out, _ = precision(*ASK, "--json")
    code, cancelled, _ = precision("jobs", "cancel", json.loads(out)["id"])
    assert code == 0
    assert "succeeded" in cancelled


def test_a_job_is_found_repeated_and_deleted(site: Path, precision: Run) -> None:
    _, out, _ = precision(*ASK, "--json")
    job = json.loads(out)["id"]
    code, out, _ = precision("jobs", "list", "--status", "succeeded", "--json")
    assert (code, [each["id"] for each in json.loads(out)]) == (0, [job])
    code, out, _ = precision("jobs", "list", "--metadata", "team=ads", "--json")
    assert (code, json.loads(out)) == (0, [])
    code, _, error = precision("jobs", "list", "--metadata", "team")
    assert (code, "KEY=VALUE" in error) == (2, True)
    code, out, _ = precision("jobs", "trials", job)
    assert code == 0
    assert "layers.0.attn_qkv=fp8_e4m3" in out
    code, out, _ = precision("jobs", "trials", job, "--kind", "stack", "--json")
    assert json.loads(out.splitlines()[0])["id"] == "chosen"
    code, out, _ = precision("jobs", "retry", job)
    assert (code, out.startswith("job_")) == (0, True)
    code, _, _ = precision("jobs", "delete", job)
    assert code == 0
    code, _, error = precision("report", job)
    assert (code, "deleted" in error or "no longer" in error) == (1, True)


def test_the_report_is_written_for_people_and_for_machines(
    site: Path, precision: Run, tmp_path: Path
) -> None:
    _, out, _ = precision(*ASK, "--json")
    job = json.loads(out)["id"]
    page = tmp_path / "reports" / "r.html"
    assert precision("report", job, "--html", "--out", str(page))[0] == 0
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    _, document, _ = precision("report", job)
    assert json.loads(document)["schema"] == "precision.report/1"


def test_models_are_added_and_listed(site: Path, precision: Run) -> None:
    folder = tiny_model(site / "models" / "other")
    code, out, err = precision("models", "add", "qwen2-7b", str(folder))
    assert (code, out) == (0, "added qwen2-7b\n"), err
    _, listed, _ = precision("models", "list")
    assert "qwen2-7b" in listed
    assert "LlamaForCausalLM" in listed


def test_a_folder_that_the_service_does_not_see_is_sent_and_the_files_come_back(
    site: Path, precision: Run, tmp_path: Path
) -> None:
    folder, out_folder = tiny_model(tmp_path / "my model"), tmp_path / "optimized"
    lines = [json.dumps({"text": f"Line {i}: " + "words " * 60}) for i in range(64)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    ask = ("optimize", str(folder), "--data", str(tmp_path / "prompts.jsonl"))
    more = ("--hardware", "h100", "--sla", "20ms", "--out", str(out_folder))
    code, out, err = precision(*ask, *more, "--json")
    assert code == 0, err
    job = json.loads(out)
    assert job["request"]["model"].startswith("my-model-")
    assert job["request"]["data_distribution"].startswith("prompts-")
    assert json.loads((out_folder / "report.json").read_text())["schema"]
    code, out, _ = precision(*ask, *more, "--json")  # nothing is sent twice
    assert (code, json.loads(out)["request"]["model"]) == (0, job["request"]["model"])
    _, out, _ = precision("models", "list", "--json")
    assert [m["name"] for m in json.loads(out) if m["uploaded"]] == [
        job["request"]["model"]
    ]
    again = ("download", job["id"], "--out", str(tmp_path / "again"), "--only")
    code, out, _ = precision(*again, "report.html", "--json")
    assert json.loads(out) == [str(tmp_path / "again" / "report.html")]
    code, _, err = precision(*again, "nothing")
    assert (code, "report.json" in err) == (1, True)


def test_models_and_datasets_are_sent_shown_and_deleted(
    site: Path, precision: Run, tmp_path: Path
) -> None:
    folder, file = tiny_model(tmp_path / "mine"), tmp_path / "lines.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"{i} " * 80}) for i in range(64)))
    code, out, err = precision("models", "add", "mine", str(folder), "--upload")
    assert (code, out) == (0, "added mine\n"), err
    _, shown, _ = precision("models", "show", "mine")
    assert "model.safetensors" in shown
    code, out, err = precision("datasets", "add", "tickets", str(file))
    assert (code, out) == (0, "added tickets\n"), err
    assert "tickets" in precision("datasets", "list")[1]
    for noun, name in (("models", "mine"), ("datasets", "tickets")):
        assert precision(noun, "delete", name)[0] == 0
        _, out, _ = precision(noun, "list", "--json")
        assert name not in [row["name"] for row in json.loads(out)]


def test_a_folder_that_is_refused_is_named(
    site: Path, precision: Run, tmp_path: Path
) -> None:
    folder = site / "models" / "pickled"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    code, _, err = precision("models", "add", "pickled", str(folder))
    assert code == 1
    assert "pickled" in err
    assert "Traceback" not in err


def test_keys_are_made_listed_and_revoked(site: Path, precision: Run) -> None:
    code, key, _ = precision("keys", "create", "--name", "ci", "--tenant", "search")
    assert code == 0
    assert key.startswith("po_live_")
    _, out, _ = precision("keys", "list", "--json")
    kid = next(row["id"] for row in json.loads(out) if row["name"] == "ci")
    url = json.loads((site / "address").read_text())["url"]
    as_ci = ("jobs", "list", "--url", url, "--key", key.strip())
    assert precision(*as_ci)[0] == 0
    assert precision("keys", "revoke", kid)[0] == 0
    code, _, err = precision(*as_ci)
    assert code == 1
    assert "API key" in err
    assert precision("keys", "revoke", "nobody")[0] == 1
    made = json.loads(precision("keys", "create", "--json")[1])
    assert precision("keys", "revoke", made["id"])[0] == 0


def test_the_local_key_never_goes_to_another_address(
    site: Path, precision: Run
) -> None:
    url = json.loads((site / "address").read_text())["url"]
    code, _, err = precision("jobs", "list", "--url", url)
    assert code == 1
    assert "API key" in err


def test_without_a_service_the_way_to_one_is_shown(
    data_dir: Path, precision: Run
) -> None:
    code, out, err = precision("jobs", "list")
    assert (code, out) == (1, "")
    assert "precision serve" in err


@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_is_wider_than_the_terminal(
    site: Path, precision: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, err = precision(*ASK)
    job = job_id(err)
    _, listed, _ = precision("jobs", "list")
    _, models, _ = precision("models", "list")
    stack = out.lstrip().split("\n\n")[0]
    lines = [line for text in (stack, listed, models) for line in text.splitlines()]
    assert [line for line in lines if len(line) > columns] == []
    assert job in listed  # in one piece


@pytest.mark.parametrize(("trains", "said"), [(False, "sweep"), (True, "candidates")])
def test_progress_without_a_terminal_is_one_line_per_phase(
    capsys: pytest.CaptureFixture[str], trains: bool, said: str
) -> None:
    with console.live_progress() as show:
        for phase, percent in (("load", 1.0), ("load", 2.0), ("sweep", 20.0)):
            progress = {"percent": percent, "eta_seconds": 75}
            request = {"training": {"steps": 100}} if trains else {}
            show(
                {
                    "status": "running",
                    "phase": phase,
                    "progress": progress,
                    "request": request,
                }
            )
    lines = capsys.readouterr().err.splitlines()
    assert [line.split() for line in lines] == [
        ["load", "1.0", "%", "eta", "1:15"],
        [said, "20.0", "%", "eta", "1:15"],
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(7, "0:07"), (750, "12:30"), (3723, "1:02:03")]
)
def test_durations_are_clock_times(value: float, text: str) -> None:
    assert console.duration(value) == text


@pytest.mark.parametrize(
    "command",
    ["serve", "demo", "optimize", "report", "jobs list", "models add", "keys create"],
)
def test_every_command_explains_itself(precision: Run, command: str) -> None:
    code, out, _ = precision(*command.split(), "--help")
    assert code == 0
    assert "--data-dir" in out
