"""What measured stacks teach the prediction: losses that interact do not just add up.

The prediction adds what each site loses alone. Measured together, kinds of sites weigh
more or less, and the whole grows faster or slower than the sum:

    kl ≈ a · (Σ over kinds of m[kind] · sum[kind]) ** b      kind: (component, choice)

a, b and every m are 1 before anything is measured, and are drawn back to 1 with the
strength of a prior, so a handful of stacks moves a and b, and many of them the kinds
they tell apart. All are positive: more loss at a site never predicts less loss of the
stack. Fitted in logarithms, weighted by the measured intervals, with outliers held down
(Huber); the most likely parameters by Gauss-Newton.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Kind = tuple[str, str]  # component, name of the choice
KlSums = Mapping[Kind, float]  # nats, of one stack
Values = NDArray[np.float64]

# How far from 1 the parameters are expected: a factor of e^±x, one standard deviation.
SPREAD_A = 1.0
SPREAD_B = 0.25
SPREAD_M = 0.4
FLOOR = 0.03  # relative error of a measurement at least: the model is not exact either
TO_DEVIATIONS = 2 * 1.96  # a 95 % interval is so many standard deviations wide
HUBER = 1.5  # standard deviations beyond which a stack pulls no harder
STEPS = 20
DIGITS = 9  # of a fit: a BLAS adds up in the order that its threads and kernels like
FOLDS = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """KL of one stack in nats, with its interval."""

    kl_nats: float
    low: float
    high: float

    def holds(self, predicted: float) -> bool:
        """Whether a prediction is within the interval."""
        return self.low <= predicted <= self.high


@dataclass(frozen=True, slots=True)
class Surrogate:
    """From what the sites of a stack lose alone to what it loses as a whole."""

    a: float = 1.0
    b: float = 1.0
    multipliers: Mapping[Kind, float] = field(default_factory=dict)  # 1 where absent
    residual: float | None = None  # relative, of stacks left out; None: under two

    @classmethod
    def fit(
        cls, predictions: Sequence[KlSums], measured: Sequence[Measured]
    ) -> "Surrogate":
        """Learn from stacks that were predicted and measured.

        Stacks without loss teach nothing. Raises ValueError for lists of different
        length.
        """
        pairs = [
            (sums, one)
            for sums, one in zip(predictions, measured, strict=True)
            if one.kl_nats > 0 and sum(sums.values()) > 0
        ]
        if not pairs:
            return cls()
        kinds = sorted({kind for sums, _ in pairs for kind in sums})
        amounts = np.array([[s.get(k, 0.0) for k in kinds] for s, _ in pairs])
        truth = np.log([one.kl_nats for _, one in pairs])
        error = np.array([_deviation(one) for _, one in pairs])
        theta = _fit(amounts, truth, error)
        residual = _left_out(amounts, truth, error) if len(pairs) > 1 else None
        return cls(
            a=math.exp(theta[0]),
            b=math.exp(theta[1]),
            multipliers=dict(zip(kinds, np.exp(theta[2:]).tolist(), strict=True)),
            residual=residual,
        )

    def weight(self, kind: Kind) -> float:
        """Return what a loss of this kind is multiplied with before it is added."""
        return self.multipliers.get(kind, 1.0)

    def predict(self, kl_sums: KlSums) -> float:
        """Return the KL of a stack in nats."""
        return self.whole(sum(self.weight(k) * v for k, v in kl_sums.items()))

    def whole(self, added: float) -> float:
        """Return the KL of a stack whose weighted losses add up to `added`."""
        return float(self.a * added**self.b) if added > 0 else 0.0

    def budget(self, kl_nats: float) -> float:
        """Inverse of `whole`: what weighted losses may add up to."""
        return float((kl_nats / self.a) ** (1 / self.b)) if kl_nats > 0 else kl_nats


def _deviation(one: Measured) -> float:
    """Standard deviation of the logarithm of a measurement."""
    width = max(one.high - one.low, 0.0) / one.kl_nats / TO_DEVIATIONS
    return math.hypot(width, FLOOR)


def _spreads(kinds: int) -> Values:
    return np.array([SPREAD_A, SPREAD_B, *[SPREAD_M] * kinds])


def _fit(amounts: Values, truth: Values, error: Values) -> Values:
    """Return log a, log b and log m (kinds,): the most likely ones.

    `amounts` (stacks, kinds); the logarithm is centered at the mean of the stacks, so
    that a and b do not work against each other.
    """
    prior = 1 / _spreads(amounts.shape[1])
    center = float(np.log(amounts.sum(axis=1)).mean())
    theta = np.zeros(len(prior))  # of the centered model: log a is at the center
    for _ in range(STEPS):
        left, jacobian = _linearized(theta, amounts, truth, center)
        scaled = left / error
        pull = np.minimum(1.0, HUBER / np.maximum(np.abs(scaled), 1e-12)) / error**2
        curvature = (jacobian.T * pull) @ jacobian + np.diag(prior**2)
        slope = jacobian.T @ (pull * left) - prior**2 * theta
        step = np.linalg.solve(curvature, slope)
        theta = theta + np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < 1e-9:
            break
    theta[0] += center - math.exp(theta[1]) * center
    return np.round(theta, DIGITS)


def _linearized(
    theta: Values, amounts: Values, truth: Values, center: float
) -> tuple[Values, Values]:
    """Return what is left to explain (stacks,), and its slopes (stacks, parameters)."""
    weighted = amounts * np.exp(theta[2:])
    added = weighted.sum(axis=1)
    x = np.log(added) - center
    b = math.exp(theta[1])
    left = truth - (center + theta[0] + b * x)
    shares = weighted / added[:, None]
    return left, np.column_stack([np.ones(len(x)), b * x, b * shares])


def _left_out(amounts: Values, truth: Values, error: Values) -> float:
    """Return the root mean square of what stacks differ from the fit of the others.

    Each alone is left out, or each `FOLDS`-th together where there are many.
    """
    fold = np.arange(len(truth)) % FOLDS
    missed = []
    for k in range(fold.max() + 1):
        theta = _fit(amounts[fold != k], truth[fold != k], error[fold != k])
        left, _ = _linearized(theta, amounts[fold == k], truth[fold == k], 0.0)
        missed += np.expm1(np.abs(left)).tolist()
    return math.sqrt(float(np.mean(np.square(missed))))


IDENTITY = Surrogate()
