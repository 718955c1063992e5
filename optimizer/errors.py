"""Everything the optimizer raises on purpose.

* OptimizerError
  * SpecError         the request contradicts itself
  * ModelError        the model folder cannot be loaded
  * DatasetError      the data has too little text, or none
  * NonFiniteError    a weight or an activation is inf or NaN
  * HardwareError     the device is unknown, or cannot do what was asked
  * Cancelled         the caller asked to stop
"""


class OptimizerError(Exception):
    """Base class; `code` is the stable name a client may match on."""

    code = "optimizer_error"
    category = "platform"


class SpecError(OptimizerError):
    """The request contradicts itself."""

    code = "bad_spec"
    category = "user"


class ModelError(OptimizerError):
    """The model folder cannot be loaded."""

    code = "model_load_failed"
    category = "model"


class DatasetError(OptimizerError):
    """The data has too little text, or none."""

    code = "calibration_data_empty"
    category = "user"


class NonFiniteError(OptimizerError):
    """A weight or an activation is inf or NaN."""

    code = "non_finite"
    category = "model"

    def __init__(self, where: str) -> None:
        super().__init__(f"non-finite value (inf or NaN) in {where}")
        self.where = where


class HardwareError(OptimizerError):
    """The device is unknown, or cannot do what was asked."""

    code = "unsupported_hardware"
    category = "hardware"


class Cancelled(OptimizerError):
    """The caller asked to stop."""

    code = "cancelled"
    category = "user"
