"""Which places of a model are watched while it is calibrated, and what they show."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from optimizer.stack import LINEAR, Component, Role, Site
from optimizer.statistics import Layout, SiteStats, layout_of

Place = tuple[Site, Role]


class Statistics:
    """The statistics of every place of a model that may get a scale."""

    def __init__(self) -> None:
        self.places: dict[Place, SiteStats] = {}
        self.ids: Tensor | None = None  # of the sequence that runs: (batch, tokens)

    def see(
        self, site: Site, role: Role, x: Tensor, keep: Tensor | None = None
    ) -> None:
        """Add a tensor; `keep` is (batch, tokens), False where a token is padding."""
        layout = layout_of(site, role)
        if not watched(site, role) or x.ndim < (2 if layout is Layout.ROWS else 4):
            return
        place = (site, role)
        stats = self.places.setdefault(place, SiteStats(layout))
        stats.add(x, keep if x.ndim > 2 else None, self._ids_of(x, layout))

    def _ids_of(self, x: Tensor, layout: Layout) -> Tensor | None:
        """Return the ids of the tokens of x, where those are the sequence's own."""
        if self.ids is None or x.ndim < 3:
            return None
        shape = x.shape[:2] if layout is Layout.ROWS else (x.shape[0], x.shape[2])
        return self.ids if self.ids.shape == shape else None

    def merge(self, other: "Statistics") -> "Statistics":
        """Return the statistics of both streams together, in either order."""
        both = Statistics()
        both.places = dict(self.places)
        for place, stats in other.places.items():
            mine = both.places.get(place)
            both.places[place] = stats if mine is None else mine.merge(stats)
        return both

    def state(self) -> dict[str, Any]:
        """Return everything as JSON, exactly: what another process merges."""
        return {f"{s} {r}": self.places[s, r].state() for s, r in sorted(self.places)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Statistics":
        """Inverse of `state`."""
        made = cls()
        for name, kept in state.items():
            site, role = name.split(" ")
            made.places[Site.parse(site), Role(role)] = SiteStats.from_state(kept)
        return made

    def of(self, site: Site) -> dict[Role, SiteStats]:
        """Return the statistics of a site's places, also where another has seen them."""
        found = {r: s for (at, r), s in self.places.items() if at == site}
        for (component, role), (source, its_role) in SAME.items():
            same = self.places.get((Site(site.layer, source), its_role))
            if component == site.component and same is not None:
                found[role] = same
        return found


_IN, _W, _OUT = Role.INPUT, Role.WEIGHT, Role.OUTPUT
# Not watched: outputs of matrices, which keep 16 bits, and what another place has seen.
WATCHED: Mapping[Component, tuple[Role, ...]] = {
    **dict.fromkeys(LINEAR, (_IN,)),
    Component.EMBEDDINGS: (_OUT,),
    Component.ATTN_SCORES: (_IN, _W),
    Component.ATTN_SOFTMAX: (_IN, _OUT),
    Component.ATTN_VALUES: (_W,),
    Component.FFN_ACT: (_IN, _OUT),
    Component.NORMS: (_IN,),
    Component.ROUTER: (_IN,),
}
SAME: Mapping[tuple[str, Role], tuple[Component, Role]] = {
    ("attn_values", _IN): (Component.ATTN_SOFTMAX, _OUT),  # P
    ("kv_cache", _IN): (Component.ATTN_SCORES, _W),  # K
    ("kv_cache", _W): (Component.ATTN_VALUES, _W),  # V
}


def watched(site: Site, role: Role) -> bool:
    """Whether statistics of a place are kept."""
    return role in WATCHED.get(site.component, ())


def to_json(
    statistics: Statistics, text_of: Callable[[int], str] | None = None
) -> list[dict[str, Any]]:
    """Return every place, in the order of the sites."""
    rows: Mapping[Place, SiteStats] = statistics.places
    return [
        {
            "site": str(site),
            "component": str(site.component),
            "layer": site.layer if site.layer >= 0 else None,
            "role": str(role),
            **rows[site, role].to_json(text_of),
        }
        for site, role in sorted(rows)
    ]
