"""A probe as a job computes it: pieces, segments, the document, the page, the exports."""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.errors import Cancelled, DatasetError, ModelError, SpecError
from optimizer.pieces import Compute, Memory, Piece, Result, Told, to_json
from optimizer.spec import OptimizeSpec
from optimizer.training import place
from optimizer.training.candidates import BASELINE, CANDIDATES
from optimizer.training.checkpoints import figures_json
from optimizer.training.job import train
from optimizer.training.layers_csv import render_csv
from optimizer.training.report import heat, render_html, render_markdown, render_pdf
from optimizer.training.spec import TASKS_OF, Planned, TrainingSpec
from optimizer.training.trainer import Figures
from optimizer.training.work import SEGMENTS, TrainingWork
from tests.service import tiny_model

Document = dict[str, Any]
TINY: dict[str, Any] = {"steps": 8, "batch_size": 4, "sequence_tokens": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def asked(folder: Path, task: str = "finetune", **how: Any) -> OptimizeSpec:
    training = replace(TASKS_OF[task], **{**TINY, "learning_rate": 3e-3, **how})
    return OptimizeSpec(
        model="tiny",
        model_path=str(folder),
        model_sha256="0" * 64,
        hardware="h100",
        task=task,
        training=training,
    )


def quiet(phase: str, fraction: float, detail: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def document(folder: Path) -> Document:
    planned = Planned(arithmetic="fp16", masters=False)
    candidates = ("bf16", "fp16", "fp8_current")
    told: list[tuple[str, float]] = []
    spec = asked(folder, candidates=candidates, planned=planned)
    found = train(spec, lambda phase, fraction, _: told.append((phase, fraction)))
    phases = list(dict.fromkeys(phase for phase, _ in told))
    assert phases == ["load", "calibrate", "sweep", "validate", "report"]
    for phase in phases:  # it never goes back
        fractions = [f for p, f in told if p == phase]
        assert fractions == sorted(fractions)
        assert max(fractions) <= 1
    return found


def test_a_gpu_is_named_and_its_runs_are_kept_for_it_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = TrainingWork(asked(folder), Memory())
    assert here.where.type == "cpu"
    assert place.executed_on()["emulated"] == ["fp8"]
    assert "emulated" in place.said()
    key = here._piece(BASELINE, 0, 0).key
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    for capability, emulated in (((9, 0), []), ((8, 0), ["fp8"])):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda *_, c=capability: c
        )
        assert place.executed_on()["device"] == "H100"
        assert place.executed_on()["emulated"] == emulated
    assert "emulated" in place.said()
    there = TrainingWork(asked(folder), Memory())
    assert there.where.type == "cuda"
    there.network = here.network  # there is no GPU to put one on
    assert there._piece(BASELINE, 0, 0).key != key


def test_the_document_is_json_and_names_what_to_train_in(document: Document) -> None:
    again = json.loads(json.dumps(document, allow_nan=False))
    assert again["schema"] == "precision.training_report/1"
    assert again["verdict"]["outcome"].startswith("recommended")
    assert again["verdict"]["chosen"] == "fp8_current"
    assert again["precision_stack"].keys() >= {"attn_qkv", "ffn_out", "lm_head"}
    loss = again["verdict"]["held_out_loss"]
    assert loss["low"] <= loss["value"] <= loss["high"]


def test_every_candidate_has_a_status_and_the_planned_one_a_cause(
    document: Document,
) -> None:
    status = {c["name"]: c["status"] for c in document["candidates"]}
    assert status["bf16"] == status["fp16"] == "safe"
    assert status["planned"] == "fails"
    planned = document["candidates"][0]["rounds"][0]["findings"]
    assert planned[0]["code"] in ("frozen_weights", "diverged")


def test_every_product_of_every_matrix_has_its_figures(document: Document) -> None:
    rows = document["baseline"]["gemms"]
    matrices = {row["matrix"] for row in document["stack"]}
    assert len(matrices) == 2 * 7 + 1
    assert {(r["matrix"], r["gemm"]) for r in rows} == {
        (m, g) for m in matrices for g in ("fprop", "dgrad", "wgrad")
    }
    one = rows[0]["operands"]["input"]["formats"]
    assert one.keys() == {"bf16", "fp16", "fp8_e4m3"}
    updates = document["baseline"]["updates"]["model.layers.0"]
    assert updates.keys() == {"ratio", "step_ratio", "least_in_steps", "rounds_away"}
    assert updates["least_in_steps"]["fp16"] == 8 * updates["least_in_steps"]["bf16"]
    tensor = rows[0]["operands"]["input"]
    counts = tensor["histogram"]["counts"]
    assert sum(counts) + tensor["histogram"]["zeros"] == tensor["histogram"]["elements"]
    assert tensor["norm"] >= tensor["amax"] > 0


def test_memory_is_the_ledgers(document: Document) -> None:
    memory = document["memory"]
    assert memory["chosen"]["total_bytes"] < memory["fp32"]["total_bytes"]
    rows = {row["name"] for row in memory["chosen"]["rows"]}
    assert rows >= {"weights", "gradients", "master_weights", "optimizer_state"}


def test_the_page_shows_it_without_script_or_network(document: Document) -> None:
    page = render_html(document)
    assert page == render_html(json.loads(json.dumps(document)))
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    for section in (
        "Loss, overlaid",
        "Drift by layer",
        "Updates",
        "Exponents by layer",
    ):
        assert section in page
    assert page.count('class="curve') >= 5
    planned = document["candidates"][0]["rounds"][0]["drift"]
    assert any(row["why"] for row in planned)
    assert "Why they drift" in page
    assert "ended</strong>: <bdi>the run ends at step 1" in page


def test_markdown_and_pdf_say_what_the_page_says(document: Document) -> None:
    said = render_markdown(document)
    assert said.startswith("# Training report: tiny on ")
    assert f"**{document['verdict']['sentence'][:20]}" in said
    for title in ("Candidates", "The training stack", "Drift by layer", "Memory"):
        assert f"## {title}\n" in said
    assert "ended: the run ends at step 1" in said
    rows = [
        line for line in said.splitlines() if line.startswith("| planned | fails |")
    ]
    assert len(rows) == 1
    assert render_pdf(document).startswith(b"%PDF-")


def test_the_csv_has_every_layer_of_every_round(document: Document) -> None:
    rows = list(csv.DictReader(render_csv(document).splitlines()))
    rounds = [(c["name"], r) for c in document["candidates"] for r in c["rounds"]]
    assert len(rows) == sum(len(r["drift"]) for _, r in rounds)
    one = rounds[0][1]["drift"][0]
    assert (rows[0]["candidate"], rows[0]["layer"]) == ("planned", one["layer"])
    assert float(rows[0]["gradient_norm"]) == one["gradient_norm"]["value"]
    assert rows[0]["why"] == one["why"]["code"]


def test_what_others_named_is_text_in_every_form(document: Document) -> None:
    bad = json.loads(json.dumps(document))
    bad["model"]["name"] = "[x](http://evil) <b>"
    bad["candidates"][0]["name"] = "=1+1"
    assert "\\[x\\](http:\\/\\/evil) &lt;b>" in render_markdown(bad)
    assert "\n'=1+1," in render_csv(bad).replace("\r", "")


def test_layer_2_stands_before_layer_10() -> None:
    cells = {f"model.layers.{n}": {"bf16": 0.1} for n in (0, 10, 2)}
    rows = heat({"model.norm": {}, **cells, "model.embed_tokens": {}}, [0.01])["rows"]
    assert [layer for layer, _ in rows] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.2",
        "model.layers.10",
        "model.norm",
    ]


def test_a_hostile_name_shows_and_does_nothing(document: Document) -> None:
    bad = json.loads(json.dumps(document))
    bad["model"]["name"] = "<script>alert(1)</script>\u202e"
    page = render_html(bad)
    assert "<script>" not in page
    assert "⟨U+202E⟩" in page


def test_an_empty_document_still_has_a_page() -> None:
    assert "Precision training report" in render_html({})
    assert render_markdown({}).startswith("# Training report")
    assert render_csv({}).startswith("candidate,round,layer,")


# -- runs as pieces


class Lost:
    """Keeps pieces, and computes each with a work that knows nothing yet."""

    def __init__(self, spec: OptimizeSpec) -> None:
        self.spec, self.kept = spec, Memory()

    def run(
        self, pieces: Sequence[Piece], compute: Compute, progress: Told
    ) -> list[Result]:
        found = []
        for piece in pieces:
            if piece.key not in self.kept.kept:
                fresh = TrainingWork(self.spec, self)
                self.kept.kept[piece.key] = to_json(fresh.compute(piece))
            found.append(json.loads(self.kept.kept[piece.key]))
        return found


def run(spec: OptimizeSpec, pieces: Any, name: str) -> Figures:
    candidate = {"fp32": BASELINE, **CANDIDATES}[name]
    return TrainingWork(spec, pieces)([(candidate, 0)])[0]


def test_a_run_whose_worker_is_lost_after_every_segment_has_the_same_bytes(
    folder: Path,
) -> None:
    spec = asked(folder)
    whole, parts = run(spec, Memory(), "fp16"), run(spec, Lost(spec), "fp16")
    assert figures_json(whole) == figures_json(parts)


def test_what_was_run_is_not_run_again(folder: Path) -> None:
    kept = Memory()
    steps: list[int] = []
    work = TrainingWork(asked(folder), kept, on_step=lambda: steps.append(1))
    first = work([(BASELINE, 0)])
    assert len(kept.kept) == SEGMENTS
    assert len(steps) == TINY["steps"]
    again = TrainingWork(asked(folder), kept, on_step=lambda: steps.append(1))
    assert figures_json(again([(BASELINE, 0)])[0]) == figures_json(first[0])
    assert len(steps) == TINY["steps"]


def test_a_run_that_is_one_piece_tells_every_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizer.training.work.KEPT_BYTES", 0)  # a large model's
    told: list[tuple[int, int]] = []
    work = TrainingWork(asked(folder), Memory(), lambda *steps: told.append(steps))
    work([(BASELINE, 0), (BASELINE, 1)])
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {done for done, _ in told} == set(range(2 * TINY["steps"] + 1))
    assert {planned for _, planned in told} == {2 * TINY["steps"]}


def test_a_cancelled_job_stops_at_the_next_step(folder: Path) -> None:
    def stop(phase: str, fraction: float, detail: str) -> None:
        if phase == "calibrate" and fraction > 0:
            raise Cancelled

    with pytest.raises(Cancelled):
        train(asked(folder), stop)


# -- other tasks


def work(folder: Path, task: str, **how: Any) -> TrainingWork:
    return TrainingWork(asked(folder, task, **how), Memory())


def test_lora_trains_adapters_alone(folder: Path) -> None:
    lora = work(folder, "lora", lora_rank=4)
    names = {n for n, p in lora.network.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 7 * 2
    assert all(".lora_" in name for name in names)
    (found,) = lora([(BASELINE, 0)])
    assert found.losses[-1] < found.losses[0] + 0.5
    assert found.norms.keys() == names


def test_a_fresh_adapter_changes_nothing(folder: Path) -> None:
    ids = torch.arange(12)[None]
    with torch.no_grad():
        plain = work(folder, "finetune").network(ids).logits
        adapted = work(folder, "lora").network(ids).logits
    assert torch.equal(plain, adapted)


def test_pretraining_draws_the_weights_afresh_and_the_same_ones(folder: Path) -> None:
    first, again, tuned = (
        work(folder, task).network.get_parameter("lm_head.weight")
        for task in ("pretrain", "pretrain", "finetune")
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, tuned)


# -- bad input

REFUSED: list[tuple[type[Exception], str, Callable[[Path], object]]] = [
    (
        DatasetError,
        r"has \d+ whole sequences of 64 tokens, and one step takes 1024",
        lambda f: work(f, "finetune", batch_size=1024, sequence_tokens=64).tokens,
    ),
    (
        SpecError,
        "lora_rank is 64; the model's smallest matrix has rank 32",
        lambda f: work(f, "lora", lora_rank=64).network,
    ),
    (
        ModelError,
        "no model folder 'nothing'",
        lambda f: work(f / "nothing", "finetune").network,
    ),
]


@pytest.mark.parametrize(("error", "said", "call"), REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(
    folder: Path, error: type[Exception], said: str, call: Callable[[Path], object]
) -> None:
    with pytest.raises(error, match=said):
        call(folder)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("steps", 0, "steps is 0; a probe takes 4 to 5000"),
        ("steps", 1_000_000, "steps is 1000000; a probe takes 4 to 5000"),
        ("learning_rate", 0.0, "learning_rate is 0; it must be over 0"),
        ("learning_rate", float("nan"), "learning_rate is nan"),
        ("learning_rate", 1e9, "learning_rate is 1e\\+09"),
        ("warmup_steps", -1, "warmup_steps is -1"),
        ("clip", 0.0, "clip is 0"),
        ("batch_size", 0, "batch_size × accumulation is 0"),
        ("accumulation", 2000, "batch_size × accumulation is 16000"),
        ("optimizer", "adm", "optimizer: no 'adm'; there are: adam, sgd"),
        ("candidates", ("fp9",), "candidates: no 'fp9'; there are: bf16"),
    ],
)
def test_a_training_out_of_bounds_is_refused_with_what_is_right(
    field: str, value: Any, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        replace(TrainingSpec(), **{field: value})


def test_a_spec_survives_json() -> None:
    spec = replace(TASKS_OF["lora"], planned=Planned(arithmetic="fp8"), clip=None)
    assert TrainingSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_16_bits_without_masters_have_no_loss_scaling() -> None:
    assert Planned(arithmetic="fp16", masters=False).candidate().loss_scaling is None
