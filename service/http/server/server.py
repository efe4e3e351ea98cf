"""uvicorn's server, except that signals end the process at once until the server has started.

uvicorn would finish its start first, which may include loading the operator's models.
"""

from __future__ import annotations

from types import FrameType

import uvicorn

from service.http.server.signals import end


class Server(uvicorn.Server):
    """A server that has nothing to finish before it has started."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            end()
        super().handle_exit(sig, frame)
