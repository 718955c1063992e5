"""Open models by name, without weights: the shapes in `data/architectures.json`.

An estimate needs sizes only, and those a config.json states. A test holds the rows: what
`configs.shape_of` counts is the number of parameters that the model's page states, to
the last one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from optimizer.configs import shape_of
from optimizer.stack import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A published model: where its config lies, and the sizes that follow from it."""

    id: str
    repositories: tuple[str, ...]  # owner/name; all of them have this shape
    source: str
    parameters: int  # as the model's page states; tied weights count once
    config: Mapping[str, Any]

    @property
    def shape(self) -> ModelShape:
        """The sizes of its sites."""
        return _shape(self.id)


@cache
def _shape(name: str) -> ModelShape:
    return shape_of(PUBLISHED[name].config)


def _read() -> dict[str, Architecture]:
    text = files("optimizer").joinpath("data/architectures.json").read_text("utf-8")
    return {
        row["id"]: Architecture(
            id=row["id"],
            repositories=tuple(row["repositories"]),
            source=row["source"],
            parameters=row["parameters"],
            config=MappingProxyType(row["config"]),
        )
        for row in json.loads(text)["models"]
    }


PUBLISHED: Mapping[str, Architecture] = MappingProxyType(_read())
"""Every model that can be estimated by name, by id."""


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


_NAMES = {
    _plain(name): published.id
    for published in PUBLISHED.values()
    for repository in published.repositories
    for name in (repository, repository.rpartition("/")[2])
} | {name: name for name in PUBLISHED}


def architecture(name: str) -> Architecture | None:
    """Return the model of this id or repository; None: it is not in the catalogue.

    Case does not matter, nor `_` or a space for `-`: `qwen2-7b`, `Qwen/Qwen2-7B`.
    """
    found = _NAMES.get(_plain(name))
    return None if found is None else PUBLISHED[found]
