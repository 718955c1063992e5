import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from api.settings import Settings, settings


def test_every_setting_says_what_it_is_for() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_everything_lies_in_the_data_folder(data_dir: Path) -> None:
    assert settings().database_url == f"sqlite:///{data_dir}/precision.db"
    assert settings().model_roots == [data_dir / "models"]


def test_roots_are_separated_as_paths_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_MODEL_ROOTS", os.pathsep.join(["/a", "/b"]))
    assert Settings().model_roots == [Path("/a"), Path("/b")]


def test_empty_roots_are_not_the_current_folder(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_MODEL_ROOTS", "")
    assert Settings().model_roots == [data_dir / "models"]
    monkeypatch.setenv("PRECISION_MODEL_ROOTS", "/a" + os.pathsep)
    assert Settings().model_roots == [Path("/a")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEASE_S", "0"),
        ("LEASE_S", "nan"),
        ("LEASE_S", "5"),  # less than three beats of 2 s
        ("MAX_ATTEMPTS", "0"),
        ("MAX_BODY_BYTES", "-1"),
        ("SWEEP_S", "inf"),
        ("LOG_LEVEL", "loud"),
        ("PUBLIC_URL", "precision.example"),
        ("WEBHOOK_ALLOW", "10.0.0.1/8"),  # host bits are set: what is meant?
        ("WEBHOOK_ALLOW", "Portal.corp"),
        ("WEBHOOK_PORTS", "443,65536"),
        ("MAINTENANCE", "x" * 501),
        ("MAINTENANCE", "Back soon.\r\nSet-Cookie: a=b"),
        ("MAINTENANCE", "Back \u202enoos"),
    ],
)
def test_a_bad_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"PRECISION_{name}", value)
    with pytest.raises(ValidationError, match=name.lower()):
        Settings()


def test_what_webhooks_may_reach_is_read_and_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECISION_WEBHOOK_ALLOW", "10.0.0.0/8, portal.corp ::1")
    monkeypatch.setenv("PRECISION_WEBHOOK_PORTS", "443,8443, 10443")
    assert Settings().webhook_allow == ["10.0.0.0/8", "portal.corp", "::1/128"]
    assert Settings().webhook_ports == [443, 8443, 10443]
    monkeypatch.setenv("PRECISION_WEBHOOK_ALLOW", "")
    assert Settings().webhook_allow == []
