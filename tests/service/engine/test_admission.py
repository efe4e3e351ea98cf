import time

import pytest

from service.engine.admission import Admission
from service.engine.errors import AdmissionFull, RequestTooLarge


def test_places_and_bytes_are_given_back() -> None:
    admission = Admission(2, 100)
    with admission.enter() as first, admission.enter() as second:
        first.claim(60)
        with pytest.raises(AdmissionFull):
            admission.enter()
        with pytest.raises(AdmissionFull):
            second.claim(41)
        second.claim(40)
        assert (admission.requests, admission.bytes) == (2, 100)
    assert (admission.requests, admission.bytes) == (0, 0)


def test_what_never_fits_is_not_told_to_come_back() -> None:
    admission = Admission(2, 100)
    with admission.enter() as ticket, pytest.raises(RequestTooLarge) as caught:
        ticket.claim(101)
    assert caught.value.retry_after is None
    assert admission.bytes == 0


def test_places_are_given_back_after_errors() -> None:
    admission = Admission(1, 100)
    for _ in range(3):
        ticket = admission.enter()
        ticket.claim(100)
        with pytest.raises(RequestTooLarge), ticket:
            ticket.claim(101)
    assert (admission.requests, admission.bytes) == (0, 0)


def test_retry_after_follows_the_drain_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    admission = Admission(100, 1000)
    assert admission.retry_after() == 1  # nothing is known yet
    for _ in range(10):  # one request every two seconds
        with admission.enter() as ticket:
            ticket.claim(1)
            clock += 2
    tickets = [admission.enter() for _ in range(6)]
    for ticket in tickets:
        ticket.__enter__()
    assert 10 <= admission.retry_after() <= 14
    refused = Admission(1, 1)
    for _ in range(10):
        with pytest.raises(RequestTooLarge), refused.enter() as ticket:
            ticket.claim(2)
    assert not refused._departures  # refusals are no progress
    clock += 100
    assert admission.retry_after() == 1  # what is long past says nothing
