"""The reservation of a request in its scope: the middleware creates it, and routes extend it."""

from __future__ import annotations

from starlette.types import Scope

from service.engine.requests.admission.admission import Reservation

_RESERVATION = "fxserve.reservation"


def set_reservation(scope: Scope, reservation: Reservation) -> None:
    """Store the reservation of a request in its scope."""
    scope[_RESERVATION] = reservation


def reservation_of(scope: Scope) -> Reservation:
    """Return the reservation of a request, which must have a body."""
    reservation = scope[_RESERVATION]
    assert isinstance(reservation, Reservation)
    return reservation
