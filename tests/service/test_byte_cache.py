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
    kept.put("too large", b"x" * 11)
    assert (kept.get("too large"), kept.bytes) == (None, 0)
