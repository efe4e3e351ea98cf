"""Values that are kept up to a number of bytes."""

from __future__ import annotations

from service.byte_cache import ByteCache


def test_what_was_used_least_recently_is_dropped() -> None:
    kept: ByteCache[str, bytes] = ByteCache(10, len)
    kept.put("a", b"1234")
    kept.put("b", b"1234")
    kept.put("b", b"123456")
    assert (kept.get("a"), kept.bytes) == (b"1234", 10)
    kept.put("c", b"12")
    assert (kept.get("b"), "b" in kept) == (None, False)
    assert (kept.get("a"), kept.get("c"), kept.bytes) == (b"1234", b"12", 6)


def test_a_value_above_the_limit_is_not_kept_and_drops_no_other() -> None:
    kept: ByteCache[str, bytes] = ByteCache(10, len)
    kept.put("a", b"1234")
    kept.put("b", b"1234")
    kept.put("too large", b"x" * 11)
    assert (kept.get("too large"), kept.get("a"), kept.get("b"), kept.bytes) == (None, b"1234", b"1234", 8)
    kept.put("a", b"x" * 11)
    assert (kept.get("a"), kept.get("b"), kept.bytes) == (None, b"1234", 4)
