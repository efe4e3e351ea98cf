"""Passes a request's reservation in its scope, from the middleware that makes it to the routes that add to it."""

from __future__ import annotations

from starlette.types import Scope

from service.engine.requests.admission import Reservation

_RESERVATION = "fxserve.reservation"


def set_reservation(scope: Scope, reservation: Reservation) -> None:
    """Store ``reservation`` in the scope."""
    scope[_RESERVATION] = reservation


def reservation_of(scope: Scope) -> Reservation:
    """The reservation of the request with this ``scope``, which has a body."""
    reservation = scope[_RESERVATION]
    assert isinstance(reservation, Reservation)
    return reservation
