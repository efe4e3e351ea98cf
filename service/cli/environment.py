"""The service's settings, as a command was given them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from service.settings import Settings


def settings_of(given: dict[str, Any]) -> Settings:
    """Settings from the environment, and from ``given`` where that is not None; raises pydantic's ValidationError."""
    from service.settings import Settings

    return Settings(**{name: value for name, value in given.items() if value is not None})


def device_of(settings: Settings) -> str:
    """The device that will be used."""
    from service.engine.placement import pick_device

    try:
        return str(pick_device(settings.device))
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(f"device: {str(error).splitlines()[0]}") from error
