import hashlib
import os
from pathlib import Path

import pytest

from service.http.access.keys import Keys, KeysInvalid, make


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys"


def line(name, scope, secret):
    return f"{name}:{scope}:{hashlib.sha256(secret.encode()).hexdigest()}\n"


def test_keys_are_found_by_their_secrets(file):
    file.write_text("# ours\n\n" + line("alice", "read", "one") + line("bob", "admin", "two") + "  # and no more\n")
    keys = Keys(file)
    assert (keys.find("one").name, keys.find("one").scope) == ("alice", "read")
    assert (keys.find("two").name, keys.find("two").scope) == ("bob", "admin")
    for wrong in ("", "three", "one ", "ONE", keys.find("one").digest.hex(), "é", "\udcff"):
        assert keys.find(wrong) is None


def test_a_made_key_goes_through_the_file(file):
    key, secret = make("alice", "admin")
    file.write_text(key.line + "\n")
    assert Keys(file).find(secret) == key
    assert secret not in key.line
    assert len(secret) >= 43  # 32 bytes
    assert make("alice", "admin")[1] != secret
    with pytest.raises(ValueError, match="name"):
        make("al:ice", "read")


@pytest.mark.parametrize(
    "text",
    [
        "alice:read",
        "alice:write:" + "0" * 64,
        "alice:read:" + "0" * 63,
        "alice:read:" + "A" * 64,
        "al ice:read:" + "0" * 64,
        "fxs_the-secret-itself",
        "",
        "# nothing",
        line("alice", "read", "one") + line("alice", "admin", "two"),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_showing_it(file, text):
    file.write_text(text)
    with pytest.raises(KeysInvalid) as caught:
        Keys(file)
    assert "secret" not in str(caught.value)
    assert "000" not in str(caught.value)


def test_a_pipe_is_refused():
    """It could be read once only, and reading one without a writer would stop the event loop."""
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as pipe:
        pipe.write(line("alice", "read", "one"))
        pipe.close()
        with pytest.raises(KeysInvalid, match=f"/dev/fd/{reading} must be a regular file"):
            Keys(Path(f"/dev/fd/{reading}"))


def test_two_keys_of_one_name_are_refused(file):
    file.write_text(line("alice", "read", "one") + line("bob", "read", "two") + line("alice", "read", "three"))
    with pytest.raises(KeysInvalid, match=r", line 3: an earlier line has the same name; give each key a name of its"):
        Keys(file)


def test_a_file_that_is_not_there(file):
    with pytest.raises(KeysInvalid, match="No such file"):
        Keys(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(KeysInvalid, match="UTF-8"):
        Keys(file)


def test_reloading_takes_new_keys_and_keeps_old_ones_where_it_cannot(file, caplog):
    file.write_text(line("alice", "read", "one"))
    keys = Keys(file)
    file.write_text(line("bob", "read", "two"))
    keys.reload()
    assert keys.find("one") is None
    assert keys.find("two").name == "bob"
    file.write_text("nonsense two\n")
    keys.reload()
    assert keys.find("two").name == "bob"
    assert "line 1" in caplog.text
    assert "nonsense" not in caplog.text
