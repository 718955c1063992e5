"""PrecisionScheduler: a run that gets unstable goes on in a wider precision.

    scheduler = PrecisionScheduler(Policy(low="fp16", high="bf16"))
    for batch in batches:
        with scheduler.autocast("cuda"):
            loss = loss_of(batch)
        ...  # backward, clip, optimizer
        scheduler.step(loss, norm)

The gradient scaler may stay as it is: in bf16 its powers of two change nothing.
Where somebody else enters autocast (Trainer, Lightning), `attach(model)` enters another
one inside, around every forward pass. `stability.py` has the rules. With several
processes the mean of their losses decides, so that all switch at the same step.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimizer.errors import SpecError
from optimizer.training import stability
from optimizer.training.metrics import as_float
from optimizer.training.stability import Outcome, Policy, Stability

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # what surrounds FP8 products; the modules ask `precision`
}
Switched = Callable[[str, int], None]


class PrecisionScheduler:
    """Decides before each step in which precision it runs."""

    def __init__(
        self, policy: Policy | None = None, on_switch: Iterable[Switched] = ()
    ) -> None:
        """`on_switch` is called with the new precision and the step it begins at.

        Raises SpecError for a precision that there is not.
        """
        self.policy = policy or Policy()
        for name in (self.policy.low, self.policy.high):
            if name not in DTYPES:
                known = ", ".join(DTYPES)
                raise SpecError(f"precision is {name!r}; there are: {known}")
        self.state = Stability()
        self._on_switch = tuple(on_switch)

    @property
    def precision(self) -> str:
        """What the next step runs in."""
        return self.state.precision(self.policy)

    @property
    def persistent(self) -> bool:
        """Whether the run stays in the wider precision for good."""
        return self.state.persistent

    def autocast(self, device_type: str, *, cache: bool = True) -> torch.autocast:
        """Return the context in which the next step computes its loss."""
        narrow = self.precision != "fp32"
        dtype = DTYPES[self.precision] if narrow else None
        return torch.autocast(device_type, dtype, enabled=narrow, cache_enabled=cache)

    def attach(self, model: nn.Module, device_type: str) -> list[RemovableHandle]:
        """Run every forward pass of `model` in `autocast`; remove() the handles to end.

        The inner context keeps no casts: those of the outer one have another dtype.
        """
        entered: list[torch.autocast] = []

        def enter(*_: object) -> None:
            entered.append(self.autocast(device_type, cache=False))
            entered[-1].__enter__()

        def leave(*_: object) -> None:
            entered.pop().__exit__(None, None, None)

        return [
            model.register_forward_pre_hook(enter, prepend=True),
            model.register_forward_hook(leave, always_call=True),
        ]

    def step(
        self,
        loss: Tensor | float | None,
        gradient_norm: Tensor | float | None = None,
        *,
        skipped: bool = False,
    ) -> str:
        """See one step of the optimizer; return what the next one runs in.

        `loss` without its scale, `gradient_norm` before clipping; `skipped`: the
        gradient scaler left the step out.
        """
        before = self.precision
        outcome = Outcome(as_float(loss), as_float(gradient_norm), skipped)
        self.state = stability.step(self.state, self.policy, _agreed(outcome))
        if self.precision != before:
            for switched in self._on_switch:
                switched(self.precision, self.state.steps)
        return self.precision

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain values."""
        return stability.to_json(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. The policy is the one given anew."""
        self.state = Stability(**state)


def _agreed(outcome: Outcome) -> Outcome:
    """Return the mean over all processes: a sum keeps what is not finite."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return outcome
    given = [outcome.loss, outcome.gradient_norm]
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    row = [math.nan if v is None else v for v in given] + [float(outcome.skipped)]
    summed = torch.tensor(row, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(summed)
    loss, norm, skipped = (summed / torch.distributed.get_world_size()).tolist()
    return Outcome(
        None if outcome.loss is None else loss,
        None if outcome.gradient_norm is None else norm,
        skipped > 0,
    )
