"""A stack.json in a request: read, and held against the model and the device it is for."""

from collections.abc import Iterable

from api import catalog
from api.errors import APIError, Invalid
from api.schemas import StackRef
from optimizer import stack_file
from optimizer.errors import ModelError
from optimizer.folder import read_json
from optimizer.hardware import LOCAL, device
from optimizer.spec import STACK_USES
from optimizer.stack import ModelShape
from optimizer.stack_file import StackFile, StackFileError

MAX_CONFIG_BYTES = 1 << 20
MOST_FAULTS = 100  # in an answer
FILE = "/stack/file"  # where the faults of the file are, in either spelling


class BadStack(APIError):
    """A stack.json cannot be used; every fault is named by its place."""

    status = 422
    code = "bad_stack"
    title = "The stack cannot be used"

    def __init__(self, detail: str, faults: Iterable[tuple[str, str]]) -> None:
        errors = [
            {"pointer": pointer, "code": self.code, "detail": said}
            for pointer, said in faults
        ]
        super().__init__(detail, errors=errors)


def read(ref: StackRef | None) -> StackFile | None:
    """Return what the file says. Raises BadStack naming every fault by its place."""
    if ref is None:
        return None
    try:
        return stack_file.from_json(ref.file)
    except StackFileError as error:
        raise _refusal(error) from None


def use(ref: StackRef | None) -> str:
    """Return what becomes of the stack. Raises Invalid."""
    said = ref.use if ref else "validate"
    if said not in STACK_USES:
        known = ", ".join(STACK_USES)
        detail = f"no use {said!r} of a stack; there are: {known}"
        raise Invalid("/stack/use", detail, "unknown_use", list(STACK_USES))
    return said


def require(
    file: StackFile, model: catalog.Weights, hardware: str, engine: str
) -> None:
    """Raise BadStack naming all that keeps a stack from this model and this device."""
    target = None if hardware == LOCAL else device(hardware)
    try:
        stack_file.check(file, _shape(model), model.sha256, target, engine)
    except StackFileError as error:
        raise _refusal(error) from None


def _shape(model: catalog.Weights) -> ModelShape | None:
    """Return the sizes by the model's config, as far as it says them."""
    from optimizer.configs import shape_of

    try:
        return shape_of(read_json(model.path, "config.json", MAX_CONFIG_BYTES))
    except ModelError:
        return (
            None  # the worker reads the network itself, and refuses by the same rules
        )


def formats(asked: tuple[str, ...], file: StackFile | None) -> tuple[str, ...]:
    """Return the formats of the request, and those of the stack that came with it."""
    choices = file.stack.choices.values() if file else ()
    named = {p.format for c in choices for p in (c.input, c.weight) if p}
    return tuple(dict.fromkeys([*asked, *sorted(named)]))


def _refusal(error: StackFileError) -> BadStack:
    faults = [(FILE + f.pointer, f.message) for f in error.faults[:MOST_FAULTS]]
    return BadStack(str(error), faults)
