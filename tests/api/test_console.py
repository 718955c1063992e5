"""Names that others chose, on a terminal: text, whatever is in them."""

import pytest

from api import console

HOSTILE = {
    "[red]q_proj[/red]": "[red]q_proj[/red]",  # markup of the library that prints
    "[/]": "[/]",
    ":smile: [link=https://x.example]y[/link]": ":smile: [link=https://x.example]y",
    "\x1b]0;owned\x07": "⟨U+001B⟩]0;owned⟨U+0007⟩",  # the window's title
    "\x1b[2J": "⟨U+001B⟩[2J",  # clears the screen
    "q\u202ejorp": "q⟨U+202E⟩jorp",  # from right to left
    "<script>alert(1)</script>": "<script>alert(1)</script>",
}


@pytest.mark.parametrize(("name", "shown"), HOSTILE.items())
def test_names_are_shown_in_tables_and_lines_as_they_are(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    shown: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    console.rows(("layer", "nats"), [(name, 1)])
    console.out.print(f"layer {name}")
    console.problem({"detail": f"no layer {name}"})
    printed = capsys.readouterr()
    assert printed.out.count(shown) == 2
    assert shown in printed.err
    assert "\x1b" not in printed.out + printed.err


def test_a_name_in_an_event_steers_nothing() -> None:
    event = {
        "seq": 1,
        "timestamp": "2026-11-01T12:00:00Z",
        "type": "artifact.created",
        "data": {"name": "a\x1b[2J", "bytes": 1},
    }
    assert "Stored a⟨U+001B⟩[2J" in console.event_line(event)
