"""A front as a piece: the search problem as JSON, and the stacks that nothing beats.

Searching takes seconds and depends on numbers alone, so a second job with the same
numbers reads what the first one found, whoever computes it.
"""

from typing import Any

import numpy as np

from optimizer import search
from optimizer.search import Edge, Edges, Groups, Option

Question = dict[str, Any]
Answer = dict[str, Any]


def question(groups: Groups, points: int, edges: Edges, max_bytes: int) -> Question:
    """Return a search for about `points` stacks of at most `max_bytes`, as JSON."""
    return {
        "options": [
            [[o.kl_nats, o.per_token_s, o.first_token_s, o.bytes] for o in group]
            for group in groups
        ],
        "edges": [
            [e.left, e.right, e.per_token_s.tolist(), e.first_token_s.tolist()]
            for e in edges
        ],
        "points": points,
        "max_bytes": max_bytes,
    }


def answer(asked: Question) -> Answer:
    """Search: return the picks of `search.front`, fastest first."""
    groups = [[Option((), *numbers) for numbers in some] for some in asked["options"]]
    edges = [
        Edge(left, right, np.array(per_token), np.array(first_token))
        for left, right, per_token, first_token in asked["edges"]
    ]
    found = search.front(
        groups, asked["points"], edges=edges, max_bytes=asked["max_bytes"]
    )
    return {"picks": [[int(place) for place in picks] for picks in found.picks]}
