"""From sensitivities and costs to a front, and from the front to one stack.

The rule: of the stacks that meet the targets and fit the memory, the one that loses
least. A loss below that of the uniform 16-bit stack is worth neither time nor memory,
though: where several stacks are as good as that one, the fastest of them is taken, and
a larger one only where that buys time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from optimizer import kept_front, search
from optimizer.casts import NO_CASTS, Casts
from optimizer.cost import SiteCost, site_cost, tied_bytes
from optimizer.formats import FP16
from optimizer.hardware import Device
from optimizer.kept_front import Answer, Question, question
from optimizer.kernels import Tables
from optimizer.padding import padded, pays
from optimizer.rules import refusals
from optimizer.search import Edge, Option
from optimizer.spec import LatencySla, OptimizeSpec, Workload
from optimizer.stack import (
    WHOLE_MODEL,
    Choice,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
)
from optimizer.sums import Sensitivities, Sensitivity
from optimizer.surrogate import IDENTITY, Kind, Surrogate

FRONT_POINTS = 24

CostOf = Callable[[SiteShape, Choice], SiteCost]


@dataclass(frozen=True, slots=True)
class Row:
    """One site × choice: what it loses and costs, or why it is refused."""

    choice: Choice
    refused: str | None
    sensitivity: Sensitivity | None  # None: refused, so never measured
    cost: SiteCost | None  # None: refused


Table = dict[Site, tuple[Row, ...]]


@dataclass(frozen=True, slots=True)
class Totals:
    """A stack's predicted loss and cost, summed over its sites and their casts."""

    kl_nats: float
    per_token_s: float
    first_token_s: float
    weight_bytes: int
    kv_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Weights and KV cache; activations are not counted."""
        return self.weight_bytes + self.kv_bytes

    def meets(self, sla: LatencySla) -> bool:
        """Whether both targets hold; an absent target always does."""
        return (sla.per_token_s is None or self.per_token_s <= sla.per_token_s) and (
            sla.first_token_s is None or self.first_token_s <= sla.first_token_s
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Sites that are decided together, and their joint options."""

    sites: tuple[Site, ...]
    choices: tuple[tuple[Choice, ...], ...]  # one tuple per option, one entry per site
    options: tuple[Option, ...]


def allowed(
    model: ModelShape,
    device: Device,
    spec: OptimizeSpec,
    overflowing: Mapping[Site, float],
) -> dict[Site, dict[Choice, str | None]]:
    """Return why each choice of each site is refused; None: it is a candidate.

    `overflowing` has the amax of the sites whose values do not fit fp16.
    """
    table = {}
    for shape in model.sites:
        refused = refusals(device, spec.engine, shape, spec.formats)
        verdicts = {
            c: None if no and pays(shape, c, device, spec, model) else no
            for c, no in refused.items()
        }
        largest = overflowing.get(shape.site)
        if largest is not None:
            no = f"values up to {largest:.4g} overflow fp16, which ends at {FP16.max:g}"
            verdicts = {
                c: no if c.name == "fp16" else why for c, why in verdicts.items()
            }
        table[shape.site] = verdicts
    return table


def candidates(
    verdicts: Mapping[Site, Mapping[Choice, str | None]],
) -> dict[Site, list[Choice]]:
    """Return the choices that are not refused."""
    return {s: [c for c, no in v.items() if no is None] for s, v in verdicts.items()}


def tabulate(
    model: ModelShape,
    verdicts: Mapping[Site, Mapping[Choice, str | None]],
    sensitivities: Sensitivities,
    cost_of: CostOf,
) -> Table:
    """Put loss and cost beside every choice."""
    shapes = {s.site: s for s in model.sites}

    def row(site: Site, choice: Choice, refused: str | None) -> Row:
        if refused is not None:
            return Row(choice, refused, None, None)
        cost = cost_of(shapes[site], choice)
        return Row(choice, None, sensitivities[site, choice], cost)

    return {
        site: tuple(row(site, c, no) for c, no in some.items())
        for site, some in verdicts.items()
    }


def modelled(
    model: ModelShape, device: Device, workload: Workload, tables: Tables | None = None
) -> CostOf:
    """Return kernel tables, the device's own where not given, as a cost function."""
    return lambda shape, choice: site_cost(
        padded(shape, choice), choice, device, workload, model, tables=tables
    )


@dataclass(slots=True)
class Chooser:
    """The search problem of one model on one device."""

    model: ModelShape
    table: Table
    max_bytes: int  # of weights and KV cache
    casts: Casts = NO_CASTS
    surrogate: Surrogate = IDENTITY  # what measured stacks taught
    as_one: tuple[tuple[Site, ...], ...] = ()  # sites that an engine gives one choice
    searched: Callable[[Question], Answer] = kept_front.answer  # may read a kept one
    groups: tuple[Group, ...] = field(init=False)
    edges: tuple[Edge, ...] = field(init=False)
    _rows: dict[Site, dict[Choice, Row]] = field(init=False)
    _fronts: dict[int, list[Stack]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = {s: {r.choice: r for r in some} for s, some in self.table.items()}
        self.groups = tuple(self._groups())
        self.edges = tuple(self._edges())

    def _groups(self) -> Iterator[Group]:
        ends = [s for s in self.table if s.component in TIED_COMPONENTS]
        joint = self.model.tied_embeddings and len(ends) == len(TIED_COMPONENTS)
        if joint:  # whether they share their bytes depends on both
            yield self._group(tuple(sorted(ends)))
        bound = {site for some in self.as_one for site in some}
        yield from map(self._alike, self.as_one)
        for site in sorted(self.table):
            if not (joint and site in ends) and site not in bound:
                yield self._group((site,))

    def _edges(self) -> Iterator[Edge]:
        """The casts between sites that are not decided together."""
        where = {
            s: (g, k)
            for g, some in enumerate(self.groups)
            for k, s in enumerate(some.sites)
        }
        for pair in self.casts.pairs:
            if not where.keys() >= set(pair):
                continue
            (left, i), (right, j) = (where[site] for site in pair)
            if left != right:
                ends = [
                    [c[k] for c in self.groups[g].choices]
                    for g, k in ((left, i), (right, j))
                ]
                yield Edge(left, right, *self.casts.between(pair, *ends))

    def _group(self, sites: tuple[Site, ...]) -> Group:
        rows = [[r for r in self.table[s] if r.refused is None] for s in sites]
        combos = list(product(*rows))
        return Group(
            sites=sites,
            choices=tuple(tuple(r.choice for r in combo) for combo in combos),
            options=tuple(self._option(sites, combo) for combo in combos),
        )

    def _alike(self, sites: tuple[Site, ...]) -> Group:
        """Return the options of sites that an engine gives one choice."""
        rows = [{r.choice: r for r in self.table[s] if not r.refused} for s in sites]
        shared = [c for c in rows[0] if all(c in some for some in rows)]
        return Group(
            sites=sites,
            choices=tuple((c,) * len(sites) for c in shared),
            options=tuple(self._option(sites, [r[c] for r in rows]) for c in shared),
        )

    def _option(self, sites: tuple[Site, ...], rows: Sequence[Row]) -> Option:
        totals = self._sum(zip(sites, rows, strict=True))
        return Option(
            choice=tuple(r.choice for r in rows),
            kl_nats=totals.kl_nats,
            per_token_s=totals.per_token_s,
            first_token_s=totals.first_token_s,
            bytes=totals.memory_bytes,
        )

    def _sum(self, pairs: Iterable[tuple[Site, Row]]) -> Totals:
        kl = per_token = first_token = 0.0
        weights = kv = 0
        ends: dict[Component, Choice] = {}
        choices: dict[Site, Choice] = {}
        for site, row in pairs:
            choices[site] = row.choice
            assert row.cost is not None
            assert row.sensitivity is not None
            kl += self._weight(site, row.choice) * row.sensitivity.kl_nats
            per_token += row.cost.per_token_s
            first_token += row.cost.first_token_s
            kv += row.cost.kv_bytes
            weights += row.cost.weight_bytes
            if site.component in TIED_COMPONENTS:
                ends[site.component] = row.choice
        if self.model.tied_embeddings and len(ends) == len(TIED_COMPONENTS):
            weights += self._tied_correction(ends)
        casts = self.casts.total(choices)
        per_token += casts.per_token_s
        first_token += casts.first_token_s
        return Totals(kl, per_token, first_token, weights, kv)

    def _tied_correction(self, ends: Mapping[Component, Choice]) -> int:
        """Bytes to add to the sum of both ends, where they are one tensor: ≤ 0."""
        apart = sum(
            cost.weight_bytes
            for component, choice in ends.items()
            if (cost := self.row(Site(WHOLE_MODEL, component), choice).cost)
        )
        table, head = (ends[c] for c in TIED_COMPONENTS)
        return tied_bytes(self.model, table, head) - apart

    def _weight(self, site: Site, choice: Choice) -> float:
        return self.surrogate.weight((str(site.component), choice.name))

    def totals(self, stack: Stack) -> Totals:
        """Return what a stack is predicted to lose and cost."""
        added = self.added(stack)
        return replace(added, kl_nats=self.surrogate.whole(added.kl_nats))

    def added(self, stack: Stack) -> Totals:
        """Return the plain sums; the loss is what the prediction is a function of."""
        return self._sum((site, self.row(site, c)) for site, c in stack.choices.items())

    def kl_sums(self, stack: Stack) -> dict[Kind, float]:
        """Return what the sites of a stack lose alone, added up by kind."""
        sums: dict[Kind, float] = defaultdict(float)
        for site, choice in stack.choices.items():
            sensitivity = self.row(site, choice).sensitivity
            assert sensitivity is not None
            sums[str(site.component), choice.name] += sensitivity.kl_nats
        return dict(sums)

    def row(self, site: Site, choice: Choice) -> Row:
        """Return the row of one choice of a site."""
        return self._rows[site][choice]

    def _stack(self, picked: Sequence[int]) -> Stack:
        choices: dict[Site, Choice] = {}
        for group, index in zip(self.groups, picked, strict=True):
            choices.update(zip(group.sites, group.choices[index], strict=True))
        return Stack(dict(sorted(choices.items())))

    def _options(self) -> list[tuple[Option, ...]]:
        return [g.options for g in self.groups]

    def front(self, points: int = FRONT_POINTS) -> list[Stack]:
        """Return surrogate-optimal stacks that fit the memory, fastest first."""
        if points not in self._fronts:
            asked = question(self._options(), points, self.edges, self.max_bytes)
            picks = self.searched(asked)["picks"]
            self._fronts[points] = [self._stack(picked) for picked in picks]
        return self._fronts[points]

    def least_loss(self, sla: LatencySla, max_bytes: int) -> Stack | None:
        """Return the stack that loses least within the targets; None: nothing meets them.

        No larger than `max_bytes` where that is possible.
        """
        for limit in (min(max_bytes, self.max_bytes), self.max_bytes):
            picked = search.solve(
                self._options(),
                edges=self.edges,
                max_bytes=limit,
                max_per_token_s=sla.per_token_s,
                max_first_token_s=sla.first_token_s,
            )
            if picked is not None:
                return self._stack(picked)
        return None

    def fastest(
        self, sla: LatencySla, max_kl_nats: float, max_bytes: int
    ) -> Stack | None:
        """Return the fastest stack within a loss, a size and the targets."""
        picked = search.solve(
            self._options(),
            edges=self.edges,
            objective="per_token_s",
            max_bytes=min(max_bytes, self.max_bytes),
            max_kl_nats=self.surrogate.budget(max_kl_nats),
            max_per_token_s=sla.per_token_s,
            max_first_token_s=sla.first_token_s,
        )
        return None if picked is None else self._stack(picked)

    def nearest(self, sla: LatencySla) -> Stack:
        """Return the stack that misses the targets by least: the fastest that fits.

        Fastest by the target that stands alone or that nothing meets.
        """
        per_token = replace(sla, first_token_s=None)
        held = (
            sla.per_token_s is None
            or self.least_loss(per_token, self.max_bytes) is not None
        )
        axis: search.Axis = "first_token_s" if held else "per_token_s"
        found = search.nearest(
            self._options(),
            edges=self.edges,
            max_bytes=self.max_bytes,
            objective=axis,
        )
        return self._stack(found)

    def uniform(self, name: str) -> Stack:
        """Return the stack that has `name` wherever it is allowed, 16 bits elsewhere."""
        return Stack({s: self._preferred(s, name) for s in sorted(self.table)})

    def _preferred(self, site: Site, name: str) -> Choice:
        usable = {r.choice.name: r.choice for r in self.table[site] if not r.refused}
        for wanted in (name, "bf16", "fp16", "fp32"):
            if wanted in usable:
                return usable[wanted]
        return next(iter(usable.values()))

    def base(self) -> tuple[str, Stack]:
        """Return the uniform 16-bit stack that serving starts from, and its name."""
        everywhere = [
            {r.choice.name for r in rows if not r.refused}
            for rows in self.table.values()
        ]
        for name in ("bf16", "fp16"):
            if all(name in usable for usable in everywhere):
                return f"all_{name}", self.uniform(name)
        return "all_16bit", self.uniform("fp16")

    def narrow(self) -> tuple[str, Stack] | None:
        """Return the uniform FP8 stack that the device runs; None: it runs none."""
        for name, label in (
            ("fp8_e4m3", "all_e4m3"),
            ("fp8_e4m3_weight_only", "all_e4m3_weight_only"),
        ):
            stack = self.uniform(name)
            if any(
                c.name == name and s.component is Component.FFN_IN
                for s, c in stack.choices.items()
            ):
                return label, stack
        return None


TIED_COMPONENTS = (Component.EMBEDDINGS, Component.LM_HEAD)


def fp8_share(model: ModelShape, stack: Stack) -> float:
    """Return the share of the matrices' elements that are stored in 8 bits."""
    narrow = total = 0
    for shape in model.sites:
        choice = stack.choices[shape.site]
        total += shape.weight_elements
        if choice.weight is not None and choice.weight.format.startswith("fp8"):
            narrow += shape.weight_elements
    return narrow / total if total else 0.0
