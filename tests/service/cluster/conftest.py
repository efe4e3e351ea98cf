"""What the tests of whole folders have, for those on Ray."""

from tests.service.offline.conftest import bucket, folder

__all__ = ["bucket", "folder"]
