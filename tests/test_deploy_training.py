"""Rules, alerts and the dashboard of training, held against what a monitor exports."""

import json
import re
import shutil
import subprocess
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from optimizer.training.health import Metric, Thresholds
from optimizer.training.prometheus import TrainingCollector
from tests.promql import Rules, Store, evaluate, seconds, values
from tests.test_deploy import DEPLOY, RUN_BOOK
from tests.training.exported import a_monitor_that_saw_everything

FILE = DEPLOY / "prometheus/training.yml"
GROUPS = yaml.safe_load(FILE.read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
TESTS = yaml.safe_load((DEPLOY / "prometheus/training_tests.yml").read_text())["tests"]
DASHBOARD = json.loads((DEPLOY / "grafana/training.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
EVERY_QUERY = [*(rule["expr"] for rule in RULES), *QUERIES]
SEVEN = (  # of R9 and of R12
    "precision:training_gradient_zero:ratio_max",
    "precision:training_scale_drift:stddev_7d",
    "precision:training_bf16_underflow:ratio_max",
    "precision:training_fp8_overflow:rate5m",
    "precision_training_gradient_norm",
    "precision:training_backoffs:ratio_rate5m",
    "precision_training_update_ratio",
)


@pytest.fixture(scope="module")
def exported() -> str:
    registry = CollectorRegistry()
    registry.register(TrainingCollector(a_monitor_that_saw_everything(), "a"))
    return generate_latest(registry).decode()


@pytest.mark.parametrize("query", EVERY_QUERY)
def test_every_query_is_promql(query: str) -> None:
    promql_parser.parse(_filled(query))


def _filled(query: str) -> str:
    return query.replace("$__rate_interval", "5m").replace("$run", ".*")


def test_every_query_is_of_what_a_monitor_exports(exported: str) -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    samples = set(re.findall(r"^(precision_\w+)", exported, re.MULTILINE))
    for query in EVERY_QUERY:
        for name in re.findall(r"\bprecision[_:][\w:]+", query):
            assert name in samples | recorded, name


def test_every_label_that_is_asked_for_is_exported(exported: str) -> None:
    labels = set(re.findall(r"(\w+)=\"", exported)) | {"metric"}
    for query in EVERY_QUERY:
        grouped = re.findall(r"\bby \(([^)]*)\)", query)
        named = {n.strip() for group in grouped for n in group.split(",")}
        assert named | set(re.findall(r"[{,](\w+)=", query)) <= labels


def test_the_seven_figures_are_on_the_dashboard() -> None:
    for name in SEVEN:
        assert any(name in query for query in QUERIES), name


def test_thresholds_are_those_of_the_monitor() -> None:
    told = {
        rule["labels"]["metric"]: float(rule["expr"][len("vector(") : -1])
        for rule in RULES
        if rule.get("record") == "precision:training_threshold"
    }
    own = {m: Thresholds().limit(m) for m in Metric if m is not Metric.NONFINITE}
    assert told == {str(metric): limit for metric, limit in own.items()}
    used = " ".join(rule["expr"] for rule in RULES if "alert" in rule)
    assert all(f'metric="{metric}"' in used for metric in told)


@pytest.mark.parametrize("told", TESTS, ids=lambda told: str(told["name"]))
def test_rules_ring_when_they_should(told: dict[str, Any]) -> None:
    store, rules = Store(), Rules(RULES)
    interval = seconds(told["interval"])
    recorded = {_labels(s["series"]): values(s["values"]) for s in told["input_series"]}
    asked = [*told.get("promql_expr_test", []), *told["alert_rule_test"]]
    last = max(seconds(each["eval_time"]) for each in asked)
    for tick in range(int(last / interval) + 1):
        now = tick * interval
        for labels, series in recorded.items():
            if tick < len(series):
                store.add(labels, now, series[tick])
        ringing = rules.at(store, now)
        for each in asked:
            if seconds(each["eval_time"]) == now:
                _check(each, store, ringing, now)


def _labels(series: str) -> frozenset[tuple[str, str]]:
    name, _, rest = series.partition("{")
    return frozenset([("__name__", name), *re.findall(r'(\w+)="([^"]*)"', rest)])


def _check(
    told: dict[str, Any],
    store: Store,
    ringing: dict[str, list[dict[str, str]]],
    now: float,
) -> None:
    if "alertname" in told:
        wanted = [alert["exp_labels"] for alert in told["exp_alerts"]]
        assert ringing[told["alertname"]] == wanted
        return
    found = evaluate(promql_parser.parse(told["expr"]), store, now)
    samples = {
        frozenset(pair for pair in _labels(s["labels"]) if pair[0] != "__name__"): s
        for s in told["exp_samples"]
    }
    assert found == {k: pytest.approx(s["value"]) for k, s in samples.items()}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_says_the_same() -> None:
    for what in (["check", "rules"], ["test", "rules"]):
        name = "training.yml" if what[0] == "check" else "training_tests.yml"
        subprocess.run(
            ["promtool", *what, str(DEPLOY / "prometheus" / name)],
            check=True,
            capture_output=True,
        )


def test_every_alert_has_a_place_in_the_run_book() -> None:
    titles = re.findall(r"^#+ (.+)$", RUN_BOOK, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
    for rule in RULES:
        if "alert" in rule:
            page, anchor = rule["annotations"]["runbook"].split("#")
            assert (page, anchor in anchors) == ("README.md", True), rule["alert"]
            assert rule["labels"]["severity"] in {"page", "ticket"}


def test_prometheus_is_told_to_read_both_files() -> None:
    told = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert told["rule_files"] == ["rules.yml", "training.yml"]
    assert {job["job_name"] for job in told["scrape_configs"]} >= {"precision-training"}
