"""The fixtures of the offline tests, for the tests on Ray."""

from tests.service.offline.conftest import bucket, folder

__all__ = ["bucket", "folder"]
