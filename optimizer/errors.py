"""Everything the optimizer raises on purpose.

* OptimizerError
  * SpecError         the request contradicts itself
  * ModelError        the model folder cannot be loaded
    * FormatError     its weights are in a format that is never opened
    * HeaderError     a safetensors header is not as the format wants it
  * DatasetError      the data has too little text, or none
  * NonFiniteError    a weight or an activation is inf or NaN
  * HardwareError     the device is unknown, or cannot do what was asked
  * ExportError       what was asked for cannot be written for its reader
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


class FormatError(ModelError):
    """The weights are in a format that is never opened, as pickles are."""

    code = "unsupported_model_format"


class HeaderError(ModelError):
    """A safetensors header is not exactly as the format wants it."""

    code = "model_header_invalid"


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


class ExportError(OptimizerError):
    """What was asked for cannot be written for its reader."""

    code = "export_refused"
    category = "user"


class Cancelled(OptimizerError):
    """The caller asked to stop."""

    code = "cancelled"
    category = "user"
