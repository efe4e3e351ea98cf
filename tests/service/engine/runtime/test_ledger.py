"""Bytes that several hold are counted once, until none of them holds them."""

from service.engine.runtime.ledger import Ledger


def test_shared_storages_count_once_until_the_last_holder_goes():
    ledger = Ledger()
    ledger.add({1: 100, 2: 10})
    ledger.add({1: 100, 3: 1})
    assert ledger.bytes == 111
    ledger.remove({1: 100, 2: 10})
    assert ledger.bytes == 101
    ledger.add({2: 7})
    ledger.remove({1: 100, 3: 1})
    ledger.remove({2: 7})
    assert ledger.bytes == 0
