"""Where a request's reservation is on its way from the middleware that makes it to the routes that add to it."""

from __future__ import annotations

from starlette.types import Scope

from service.engine.requests.admission import Reservation

_RESERVATION = "fxserve.reservation"


def set_reservation(scope: Scope, reservation: Reservation) -> None:
    """Let the routes find ``reservation``."""
    scope[_RESERVATION] = reservation


def reservation_of(scope: Scope) -> Reservation:
    """What the request with a body, whose ``scope`` it is, holds until its answer is sent."""
    reservation = scope[_RESERVATION]
    assert isinstance(reservation, Reservation)
    return reservation
