"""The tiny model's request, as the tests of the optimizer have it."""

from tests.optimizer.conftest import spec

__all__ = ["spec"]
