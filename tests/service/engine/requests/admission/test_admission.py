import asyncio
import time

import pytest

from service.engine.requests.admission.admission import Admission, Reservation, Ticket
from service.problems import AdmissionFull, RequestTooLarge


def test_slots_and_bytes_are_released() -> None:
    admission = Admission(2, 100)
    with admission.enter("a") as first:
        second = admission.enter("somebody else")
        first.claim(60)
        with pytest.raises(AdmissionFull):
            admission.enter("a")
        with pytest.raises(AdmissionFull):
            admission.check("a")
        with pytest.raises(AdmissionFull):
            second.claim(41)
        second.claim(30, response=10)
        assert (admission.requests, admission.bytes) == (2, 100)
        second.__exit__(None, None, None)
        assert (admission.requests, admission.bytes) == (1, 60)
    assert (admission.requests, admission.bytes) == (0, 0)


def test_slots_are_released_after_errors() -> None:
    admission = Admission(1, 100)
    for _ in range(3):
        ticket = admission.enter("a")
        ticket.claim(100)
        with pytest.raises(RequestTooLarge) as caught, ticket:
            ticket.claim(101)
        assert caught.value.retry_after is None  # it never fits
    assert (admission.requests, admission.bytes) == (0, 0)


def test_retry_after_follows_the_drain_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    admission = Admission(100, 1000)
    assert admission.retry_after("a") == 1  # nothing is known yet
    for _ in range(10):  # one request every two seconds
        with admission.enter("a") as ticket:
            ticket.claim(1)
            clock += 2
    tickets = [admission.enter("a") for _ in range(6)]
    for ticket in tickets:
        ticket.__enter__()
    assert 10 <= admission.retry_after("a") <= 14
    clock += 100
    assert admission.retry_after("a") == 10  # nothing left in ten seconds: in the next ten it may be so again
    for ticket in tickets:
        ticket.claim(1)
        ticket.__exit__(None, None, None)
    clock += 1000  # when nobody asks, nothing leaves, which does not mean that it is slow
    with admission.enter("a"):
        assert admission.retry_after("a") == 2  # six left in the last ten seconds
    refused = Admission(1, 1)
    for _ in range(10):
        with pytest.raises(RequestTooLarge), refused.enter("a") as ticket:
            ticket.claim(2)
    assert not refused._departures  # refusals are no progress


def full(monkeypatch: pytest.MonkeyPatch) -> tuple[Admission, list[Ticket], list[float]]:
    """A full admission that served ten requests a second, what ten clients hold of it, and its clock."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    admission = Admission(10, 1000)
    for _ in range(100):
        with admission.enter("a") as ticket:
            ticket.claim(1)
            clock[0] += 0.1
    return admission, [admission.enter(f"client {number}") for number in range(10)], clock


def refused(admission: Admission, client: str) -> float:
    """After how many seconds a client is told to come back."""
    with pytest.raises(AdmissionFull) as caught:
        admission.check(client)
    return caught.value.retry_after


def test_clients_that_are_refused_together_come_back_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    admission, _, _ = full(monkeypatch)
    waits = [refused(admission, "a") for _ in range(40)]
    assert [waits.count(seconds) for seconds in (1, 2, 3, 4, 5)] == pytest.approx([1, 10, 10, 10, 9], abs=2)


def test_a_client_that_ignores_its_refusals_delays_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    admission, held, clock = full(monkeypatch)
    for _ in range(200):
        refused(admission, "in a hurry")
    assert refused(admission, "in a hurry") >= 8  # its own retries come one after another
    assert refused(admission, "patient") <= 2
    waits = [refused(admission, f"one of many {number}") for number in range(40)]
    assert waits == sorted(waits)
    assert 5 <= waits[-1] <= 6  # so do those of many clients
    for ticket in held:
        ticket.__exit__(None, None, None)
    clock[0] += 60
    assert admission.retry_after("in a hurry") == 1


def entered(admission: Admission, client: str) -> int:
    """How many places a client gets that takes all it can."""
    taken = 0
    while True:
        try:
            admission.enter(client)
        except AdmissionFull:
            return taken
        taken += 1


def test_slots_are_left_for_other_clients() -> None:
    admission = Admission(256, 1000)
    assert entered(admission, "a") == 228  # of 256 eight ninths, the last one taken while 29 were free
    assert entered(admission, "b") > 20
    assert entered(admission, "c") > 1
    assert entered(Admission(1, 1000), "a") == 1  # small servers are not made smaller
    assert entered(Admission(8, 1000), "a") == 8


def test_bytes_are_left_for_others() -> None:
    admission = Admission(100, 900)
    first, second = admission.enter("a"), admission.enter("a")
    first.claim(400)
    second.claim(400)
    with pytest.raises(AdmissionFull, match="for other clients"):
        second.claim(1)
    admission.enter("b").claim(100)


def test_one_request_may_take_everything() -> None:
    """Otherwise it would be told to come back for ever."""
    admission = Admission(100, 900)
    with Reservation(admission, "a") as reservation:
        reservation.claim(100)
        with admission.enter("a", reservation) as ticket:
            ticket.claim(700, response=100)
            assert admission.bytes == 900
            with pytest.raises(RequestTooLarge):
                ticket.claim(1)


def test_body_and_response_are_reserved_until_the_request_ends() -> None:
    admission = Admission(10, 100)
    with Reservation(admission, "a") as reservation:
        reservation.claim(20)
        with admission.enter("a", reservation) as ticket:
            ticket.claim(30, response=5)
            assert admission.bytes == 55
        assert admission.bytes == 25
        ticket = admission.enter("a", reservation)
        ticket.claim(20, response=20)
        ticket.__exit__(AdmissionFull, AdmissionFull("of something else", 1), None)
        assert admission.bytes == 25
    assert admission.bytes == 0


def test_turns_are_round_robin_by_client() -> None:
    """One with a single request waits for one round, not for all that another sent before."""
    order: list[str] = []

    async def work(admission: Admission, client: str) -> None:
        with admission.enter(client) as ticket:
            await ticket.turn()
            order.append(client)
            await asyncio.sleep(0)

    async def main() -> Admission:
        admission = Admission(1000, 1000, max_turns=2)
        senders = "a" * 50 + "b" + "c" * 3
        await asyncio.gather(*(work(admission, client) for client in senders))
        return admission

    admission = asyncio.run(main())
    assert len(order) == 54
    assert order.index("b") <= 5
    assert [place for place, client in enumerate(order) if client == "c"][-1] <= 12
    assert (admission.requests, admission._turns, len(admission._waiting)) == (0, 0, 0)


def test_turns_of_disconnected_clients_go_to_the_next() -> None:
    async def main() -> None:
        admission = Admission(100, 1000, max_turns=1)

        def ask(client: str) -> tuple[Ticket, asyncio.Task[float]]:
            ticket = admission.enter(client)
            return ticket, asyncio.create_task(ticket.turn())

        asked = [ask(client) for client in "aabbc"]
        await asyncio.sleep(0)
        assert [task.done() for _, task in asked] == [True, False, False, False, False]
        asked[1][1].cancel()  # waits
        asked[2][1].cancel()  # cancelled, and passed over before it knows
        asked[0][0].__exit__(None, None, None)
        asked[3][1].cancel()  # was given the turn in the same moment
        for _ in range(4):
            await asyncio.sleep(0)
        assert asked[4][1].done()
        asked[4][0].__exit__(None, None, None)
        assert (admission._turns, len(admission._waiting)) == (0, 0)

    asyncio.run(main())
