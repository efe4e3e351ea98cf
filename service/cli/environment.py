"""The settings of a command, from its options and the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from service.settings import Settings


def settings_of(options: dict[str, Any]) -> Settings:
    """Read the settings from the environment; ``options`` that are not None take precedence.

    Raises:
        pydantic.ValidationError: a value is invalid.
    """
    from service.settings import Settings

    return Settings(**{name: value for name, value in options.items() if value is not None})


def device_of(settings: Settings) -> str:
    """Return the name of the device that will be used.

    Raises:
        typer.BadParameter: the device does not exist.
    """
    from service.engine.placement import pick_device

    try:
        return str(pick_device(settings.device))
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(f"device: {str(error).splitlines()[0]}") from error
