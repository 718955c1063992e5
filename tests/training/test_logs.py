"""Logs as they come: of several loggers, in disorder, cut, in other units."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboardX import SummaryWriter

from optimizer.training.log_files import jsonl_log, parse_log, read_log
from optimizer.training.logs import LogError, run_log

ROWS = [{"step": n, "loss": 5.0 - n, "grad_norm": 1.0} for n in range(4)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_json_lines() -> None:
    log = parse_log(lines(ROWS))
    assert log.series("loss") == [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0)]
    assert log.columns == {"loss": "loss", "gradient_norm": "grad_norm"}
    assert log.missing == ("loss_scale", "learning_rate")
    assert log.notes == ()


@pytest.mark.parametrize(
    ("row", "figure"),
    [
        ({"train/global_step": 3, "train/loss": 2.0}, "loss"),
        ({"Iteration": 3, "lm loss": 2.0}, "loss"),
        ({"_step": 3, "train/grad-norm": 2.0}, "gradient_norm"),
        ({"num_updates": 3, "gnorm": "2.0"}, "gradient_norm"),
        ({"global_step": 3, "scaler/scale": 2.0}, "loss_scale"),
        ({"step": 3, "lr-AdamW": 2.0}, "learning_rate"),
    ],
)
def test_names_of_other_loggers(row: dict[str, Any], figure: str) -> None:
    assert run_log([row]).series(figure) == [(3, 2.0)]


def test_evaluations_are_no_steps_of_training() -> None:
    rows = [*ROWS, {"step": 3, "eval/loss": 9.0, "eval_loss": 9.0, "val_loss": 9.0}]
    assert run_log(rows).series("loss")[-1] == (3, 2.0)


def test_the_state_of_a_trainer(tmp_path: Path) -> None:
    history = [
        *({"epoch": 0.1, "learning_rate": 1e-4, **row} for row in ROWS),
        {"epoch": 1, "step": 4, "eval_loss": 9.0},
        {"step": 4, "train_loss": 3.5, "train_runtime": 7.0},
    ]
    state = {"best_metric": None, "log_history": history, "max_steps": 4}
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(state, indent=2))
    log = read_log(tmp_path)
    assert log.series("loss") == [(n, 5.0 - n) for n in range(4)]
    assert "learning_rate" in log.columns
    assert log.notes == ()
    text = path.read_bytes()
    cut = parse_log(text[: text.index(b'"step": 3')])
    assert [step for step, _ in cut.series("loss")] == [0, 1, 2]
    assert cut.notes == ("trainer_state.json is cut after 3 entries",)


def test_events_of_tensorboard_and_where_they_are_cut(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "run")) as writer:
        for row in ROWS:
            writer.add_scalar("train/loss", row["loss"], row["step"])
            writer.add_scalar("train/learning_rate", 0.5, row["step"])
            writer.add_scalar("eval/loss", 77.0, row["step"])
    log = read_log(tmp_path)
    assert log.series("loss") == [(n, 5.0 - n) for n in range(4)]
    assert log.series("learning_rate") == [(n, 0.5) for n in range(4)]
    assert log.notes == ()
    (path,) = (tmp_path / "run").iterdir()
    cut = parse_log(path.read_bytes()[:-60])
    assert cut.series("loss")[:3] == log.series("loss")[:3]
    assert cut.notes[0].startswith("the event file is cut after ")


def test_a_line_that_is_cut_is_left_out() -> None:
    log = parse_log(lines(ROWS)[:-10])
    assert len(log.records) == 3
    assert log.notes == ("the last line (4) is cut, and left out",)


def test_lines_that_are_no_json_are_told() -> None:
    log = parse_log(
        b"starting\n" + lines(ROWS) + b"Traceback (most recent call last)\n{}"
    )
    assert len(log.records) == 4
    assert log.notes == ("2 lines are no JSON objects, the first is line 1",)


def test_steps_in_disorder_are_sorted() -> None:
    log = run_log(ROWS[::-1])
    assert [r.step for r in log.records] == [0, 1, 2, 3]
    assert log.notes == ("steps go back 3 times: sorted by step",)


def test_of_a_resumed_run_the_later_steps_count() -> None:
    log = run_log([*ROWS, {"step": 2, "loss": 2.9}, {"step": 3, "loss": 1.9}])
    assert [v for _, v in log.series("loss")] == [5.0, 4.0, 2.9, 1.9]
    assert log.notes == (
        "2 steps are there twice, as after a resumed run: the later counts",
    )


def test_a_line_for_each_figure_is_put_together() -> None:
    log = run_log([{"step": 1, "loss": 2.0}, {"step": 1, "grad_norm": 3.0}])
    assert (log.records[0].loss, log.records[0].gradient_norm) == (2.0, 3.0)


def test_without_steps_lines_are_counted() -> None:
    log = run_log([{"loss": 3.0}, {"epoch": 1, "loss": 2.0}])
    assert log.series("loss") == [(0, 3.0), (1, 2.0)]
    assert log.notes == ("no column of steps: lines are counted instead",)


@pytest.mark.parametrize("value", [None, "NaN", "nan", math.nan])
def test_not_a_number_is_written_in_many_ways(value: Any) -> None:
    (_, loss), *_ = run_log([{"step": 0, "loss": value}]).series("loss")
    assert math.isnan(loss)


def test_words_are_left_out_and_counted() -> None:
    log = run_log([*ROWS, {"step": 4, "loss": "diverged"}, {"step": "?", "loss": 1}])
    assert [step for step, _ in log.series("loss")] == [0, 1, 2, 3]
    assert set(log.notes) == {
        "loss: 1 values are no numbers, and left out",
        "step: 1 values are no numbers, and left out",
    }


def test_a_loss_scale_by_its_logarithm_is_known_by_its_steps() -> None:
    rows = [{"step": n, "loss_scale": v} for n, v in enumerate([16, 15, 15, 14])]
    log = run_log(rows)
    assert [v for _, v in log.series("loss_scale")] == [65536, 32768, 32768, 16384]
    assert log.notes == ("loss_scale moves by ones: read as log2 of the loss scale",)
    plain = run_log([{"step": n, "loss_scale": v} for n, v in enumerate([16, 8, 4])])
    assert [v for _, v in plain.series("loss_scale")] == [16, 8, 4]


def test_figures_that_can_be_no_such_are_not_used() -> None:
    odd = {"lr": 300.0, "grad_norm": -1.0, "loss_scale": -8.5}
    log = run_log([r | odd for r in ROWS])
    assert log.missing == ("gradient_norm", "loss_scale", "learning_rate")
    assert log.notes == (
        "loss_scale is -8.5 at step 0, so no scale: not used",
        "lr reaches 300, in some other unit: not used",
        "grad_norm is negative at step 0, so no norm: not used",
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the log is empty: it may be JSON lines, trainer_state.json, or"),
        (b" \n", "the log is empty"),
        (b"hello\n", "no line is a JSON object; the first is 'hello'"),
        (b"\x89PNG\xff\xff" * 9, "the log is no text"),
        (b'{"epoch": 1, "accuracy": 2}', "no usable loss, grad_norm, loss_scale or"),
        (b'{"epoch": 1, "accuracy": 2}', "it has: accuracy, epoch"),
        (b"[]", "the log is empty: it needs lines with a step and loss"),
        (b'{"step": 1, "lr": 77}', "it has: lr, step (lr reaches 77, in some other"),
        (
            b'{"step": 1, "loss": "x"}',
            "it has: loss, step (loss: 1 values are no numbers",
        ),
        (b'{"loss": ' + b"[" * 100_000, "no line is a JSON object"),
    ],
)
def test_what_has_nothing_to_read_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(LogError) as refused:
        parse_log(content)
    assert said in str(refused.value)


def test_folders_and_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"no file .*run\.jsonl"):
        read_log(tmp_path / "run.jsonl")
    with pytest.raises(LogError, match="has no log: JSON lines"):
        read_log(tmp_path)


def test_what_a_monitor_writes_is_what_is_read(tmp_path: Path) -> None:
    write = jsonl_log(tmp_path / "run.jsonl")
    for row in [*ROWS, {"step": 4, "loss": math.nan}]:
        write(row)
    log = read_log(tmp_path)
    assert log.series("loss")[:4] == [(n, 5.0 - n) for n in range(4)]
    assert math.isnan(log.records[4].loss or 0)
