"""Which images are found, and that they can be read."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from fxcore.errors import BadImage, FxError
from fxcore.images.files import FORMATS
from service.offline.inputs.reader import Reader
from service.offline.inputs.skipped import Skipped
from service.offline.inputs.sources import Source, find
from service.offline.outputs.index import Index
from tests.hostile_images import photo, saved
from tests.service.offline.conftest import add, archive, png


def names(*inputs: object) -> list[str]:
    return sorted(source.path for source in find(map(str, inputs)))


def read(sources: Iterable[Source]) -> dict[str, bytes]:
    """Read sources in their order: path → bytes."""
    with closing(Reader(10**6)) as reader:
        return {source.path: reader.read(source) for source in sources}


def test_folders_are_searched_to_the_bottom_for_images(folder: Callable[..., Path]) -> None:
    root = folder(4)
    (root / "notes.txt").write_text("no image")
    (root / "SHOUT.JPEG").write_bytes(png(9))
    relative = ["001.png", "002.png", "SHOUT.JPEG", "deep/er/000.png", "deep/er/003.png"]
    assert names(root) == [str(root / name) for name in relative]


TEXTS = {
    "1.txt": b"BMW and others\n" * 9,
    "2.TXT": b"Python, P1 and P6\n",
    "3.txt": b"P1 is a format",
    "notes": b"P",
    "empty": b"",
    "page.heic": b"\0\0\0\x18ftypheic" + bytes(40),
}


def test_files_without_a_known_suffix_are_told_by_their_content(tmp_path: Path) -> None:
    files = {f"{format}{suffix}": saved(photo(), format) for format in FORMATS for suffix in ("", ".upload")}
    for suffix, format in (("jfif", "JPEG"), ("mpo", "JPEG"), ("apng", "PNG"), ("dib", "DIB")):
        files[f"a.{suffix}"] = saved(photo(), format)
    files["cut.jp2"] = b"damaged, as its error will say"
    root = tmp_path / "in"
    root.mkdir()
    for name, data in (files | TEXTS).items():
        (root / name).write_bytes(data)
    os.mkfifo(root / "pipe")
    (root / "gone").symlink_to("nowhere")
    for given in (root, root / "*"):
        skipped = Skipped()
        assert sorted(source.path for source in find([str(given)], skipped)) == sorted(str(root / n) for n in files)
        assert skipped.count == len(TEXTS) + 2
    assert names(root / "notes") == [str(root / "notes")]  # named itself, it has to be one


def test_a_folder_with_links_to_it_is_read_by_its_own_path(tmp_path: Path) -> None:
    """Whatever the order of the listing: a link made before a resumed run must not rename what is done."""
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "x.png").write_bytes(png(0))
    for number in range(20):
        (root / f"link{number}").symlink_to("a")
    assert names(root) == [str(root / "a" / "x.png")]


def test_a_pipe_with_the_suffix_of_an_image_is_not_waited_for(folder: Callable[..., Path]) -> None:
    root = folder(1)
    pipes = [root / "p.jpg", root / "p.tar", root / "pipe"]
    for pipe in pipes:
        os.mkfifo(pipe)
    (root / "null.png").symlink_to(os.devnull)
    (root / "link.png").symlink_to(next(root.rglob("000.png")))
    reader = Reader(10**6)
    for given in ([root], [root / "*"], [root / "null.png", root / "link.png", *pipes], [f"file://{root}"]):
        reasons: dict[str, str] = {}
        given_back = set()
        for source in find(map(str, given)):
            name = Path(source.path).name
            if source.error is not None:
                reasons[name] = source.error
                continue
            try:
                assert reader.read(source) == png(0)
                given_back.add(name)
            except BadImage as error:
                reasons[name] = error.detail
        assert reasons.keys() - {"pipe"} == {"p.jpg", "p.tar", "null.png"}, given
        assert all("not a regular file" in reason for reason in reasons.values()), reasons
        assert "link.png" in given_back
    reader.close()


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_members_of_archives_are_told_by_their_content(mode: str, tmp_path: Path) -> None:
    images = {format: saved(photo(), format) for format in FORMATS}
    path = tmp_path / "linked.tar"
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in {**TEXTS, **images, "last.txt": b"text"}.items():
            add(tar, name, data)
        for name, target in {"to image": "PNG", "to text": "notes", "to nothing": "gone"}.items():
            add(tar, name, link=target, kind=tarfile.SYMTYPE)
    skipped = Skipped()
    images["to image"] = images["PNG"]
    assert read(find([str(path)], skipped)) == {f"{path}/{name}": data for name, data in images.items()}
    assert skipped.count == len(TEXTS) + 3  # the last text and two links


def test_what_was_skipped_is_said_in_a_line(tmp_path: Path) -> None:
    for name, data in TEXTS.items():
        (tmp_path / name).write_bytes(data)
    skipped = Skipped()
    assert not list(find([str(tmp_path)], skipped))
    assert str(skipped) == "skipped 6 files that are not images: 3 .txt, .heic, empty, notes"
    for number in range(5000):  # of as many kinds
        skipped.add(f"folder/{'long' * 99}\n.{number}")
    assert str(skipped).startswith("skipped 5006 files that are not images: 3 .txt, ")
    assert len(str(skipped)) < 300
    assert "\n" not in str(skipped)


def test_relative_names_mean_the_same_from_anywhere(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder(2)
    monkeypatch.chdir(root.parent)
    assert names("photos") == names("./photos/") == names(root)


def test_links_in_a_circle_end(folder: Callable[..., Path], tmp_path: Path) -> None:
    root = folder(2)
    (root / "again").symlink_to(root)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.png").write_bytes(png(5))
    (root / "other").symlink_to(elsewhere)
    assert [Path(name).name for name in names(root)] == ["001.png", "000.png", "linked.png"]


def test_a_link_that_cannot_be_followed_costs_no_other_its_place(folder: Callable[..., Path]) -> None:
    root = folder(9)
    right = names(root)
    (root / "circle").symlink_to("circle")
    (root / "through.png").symlink_to(root / "001.png/x")
    (root / "gone").symlink_to("nowhere")  # no image by its name, and no folder
    found = list(find([str(root)]))
    assert sorted(source.path for source in found if source.error is None) == right
    assert {Path(source.path).name: source.error for source in found if source.error is not None} == {
        "circle": "Too many levels of symbolic links",
        "through.png": "Not a directory",
    }


def test_patterns_and_files_of_any_name(folder: Callable[..., Path]) -> None:
    root = folder(4)
    (root / "noname").write_bytes(png(7))
    assert names(root / "**/*.png") == names(root / "*.png", root / "deep")
    assert names(root / "noname") == [str(root / "noname")]
    bracket = root / "a[1].png"
    bracket.write_bytes(png(8))
    assert names(bracket) == [str(bracket)]


def test_the_working_folder_is_no_part_of_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "photos [1]" / "in *"
    here.mkdir(parents=True)
    images = here / "x.png", here.parent / "y.png"
    for image in images:
        image.write_bytes(png(0))
    monkeypatch.chdir(here)
    for patterns in (["*.png", "../*.png"], ["./[x].png", "../[y].png"], ["../**/*.png"]):
        assert names(*patterns) == sorted(map(str, images)), patterns


def test_a_pattern_that_ends_in_a_slash_matches_only_folders(folder: Callable[..., Path]) -> None:
    root = folder(4)
    assert names(f"{root}/*/") == names(root / "deep") == sorted(map(str, (root / "deep").rglob("*.png")))


@pytest.mark.parametrize(("text", "said"), [("gone", "gone: No such file or folder"), ("*.gif", "nothing matches")])
def test_missing_inputs_are_reported(text: str, said: str, folder: Callable[..., Path]) -> None:
    with pytest.raises(FxError, match=said):
        names(folder(1), folder(1) / text)


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [("tar", "w"), ("tar.gz", "w:gz"), ("tgz", "w:gz"), ("tar.xz", "w:xz"), ("x.tar", "w:gz"), ("tgz", "w")],
)
def test_archives_give_their_images(suffix: str, mode: str, tmp_path: Path) -> None:
    members = {"b/1.png": png(1), "b/1.cls": b"3", "a/0.png": png(0), "c.json": b"{}", "a/2.PNG": png(2)}
    path = archive(tmp_path / f"shard-0.{suffix}", members, mode)
    found = {source.path: source for source in find([str(tmp_path)])}
    assert sorted(found) == [f"{path}/{name}" for name in ("a/0.png", "a/2.PNG", "b/1.png")]
    asked = ("a/2.PNG", "b/1.png", "a/0.png")  # forwards and backwards
    assert read(found[f"{path}/{name}"] for name in asked) == {f"{path}/{name}": members[name] for name in asked}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_links_in_archives_give_what_they_are_of(mode: str, tmp_path: Path) -> None:
    root = tmp_path / "in"
    (root / "deep").mkdir(parents=True)
    (root / "a.png").write_bytes(png(1))
    (root / "deep/hard.png").hardlink_to(root / "a.png")
    (root / "deep/soft.png").symlink_to("../a.png")
    (root / "deep/gone.png").symlink_to("/nowhere.png")
    path = tmp_path / "x.tar"
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        tar.add(root, ".")
    found = list(find([str(path)]))
    assert {Path(source.path).name: source.error for source in found if source.error is not None} == {
        "gone.png": "a link to /nowhere.png, which is not in the archive"
    }
    given = read(source for source in found if source.error is None)
    assert given == {f"{path}/{name}": png(1) for name in ("a.png", "deep/hard.png", "deep/soft.png")}


def test_members_have_the_names_they_are_unpacked_to(tmp_path: Path) -> None:
    """GNU tar adds to an archive without looking at what it has, and unpacks the last of a name."""
    path = archive(tmp_path / "x.tar", {"./a.png": png(1), "b//c.png": png(2), "a.png": png(3)})
    with closing(Index(tmp_path)) as index:
        index.add(find([str(path)]))
        [found] = index.pending()
    assert read(found) == {f"{path}/a.png": png(3), f"{path}/b/c.png": png(2)}


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_damaged_archive_gives_what_comes_before_the_damage(suffix: str, tmp_path: Path) -> None:
    whole = archive(tmp_path / f"x.{suffix}", {f"{n}.png": png(n) for n in range(9)}, "w:gz" if "gz" in suffix else "w")
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    found = list(find([str(whole)]))
    assert 0 < len(found) < 9
    assert found[-1].path == str(whole)
    assert "cannot be read to its end" in str(found[-1].error)


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_header_is_not_the_end_of_an_archive(cut: bool, tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {f"{n}.png": png(n) for n in range(9)})
    with tarfile.open(path) as tar:
        start = tar.getmembers()[5].offset
    data = path.read_bytes()
    path.write_bytes(data[: start + 100] if cut else data[:start] + b"?" * 8 + data[start + 8 :])
    *found, last = find([str(path)])
    assert [source.path for source in found] == [f"{path}/{n}.png" for n in range(5)]
    assert last.path == str(path)
    assert "cannot be read to its end" in str(last.error)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_damaged_compressed_archive_costs_no_other_file(kind: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(200_000)  # which is larger than what is read ahead
    whole = archive(tmp_path / f"x.tar.{kind}", {f"{n}.png": noise for n in range(4)}, f"w:{kind}")
    (tmp_path / "y.png").write_bytes(png(0))
    data = bytearray(whole.read_bytes())
    reader = Reader(10**6)
    for place in range(len(data) // 8, len(data), len(data) // 8):
        damaged = data.copy()
        damaged[place : place + 32] = bytes(32)
        whole.write_bytes(damaged)
        found = list(find([str(tmp_path)]))
        assert str(tmp_path / "y.png") in {source.path for source in found}
        if not any(source.path == str(whole) for source in found):  # no header is damaged: reading tells
            for source in found:
                with suppress(BadImage):
                    reader.read(source)
    reader.close()


def test_names_that_are_not_text(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.png")
    with open(path, "wb") as file:
        file.write(png(3))
    assert read(find([str(tmp_path)])) == {f"{tmp_path}/caf\\xe9.png": png(3)}


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(0))
    with pytest.raises(BadImage, match=r"at most 100 are allowed \(FXSERVE_MAX_BODY_BYTES\)"):
        Reader(100).read(Source(str(file), str(file)))
    with pytest.raises(BadImage, match="No such file or directory"):
        Reader(100).read(Source("x", str(tmp_path / "x")))
    with pytest.raises(BadImage, match="Is a directory"):
        Reader(100).read(Source("x", str(tmp_path)))


def test_links_in_archives_are_to_the_same_versions_as_when_unpacked(tmp_path: Path) -> None:
    """An archive may hold a file again, in a later version, as ``tar --append`` does."""
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "a.png", png(1))
        add(tar, "a.png", png(2))
        add(tar, "hard.png", link="a.png")
        add(tar, "then file.png", link="a.png")
        add(tar, "then file.png", png(4))
        add(tar, "b.png", png(5))
        add(tar, "again.png", link="a.png")
        add(tar, "again.png", link="b.png")
        add(tar, "a.png", png(3))
        add(tar, "soft.png", link="a.png", kind=tarfile.SYMTYPE)
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", path, "-C", tmp_path / "unpacked"], check=True)
    found = {source.path: source for source in find([str(path)])}  # the last of a path counts
    unpacked = {f"{path}/{file.name}": file.read_bytes() for file in (tmp_path / "unpacked").iterdir()}
    assert read(found.values()) == unpacked


def test_sparse_members_of_archives_are_refused(tmp_path: Path) -> None:
    """Their pieces without the zeros between them would be an image of other pixels."""
    image = tmp_path / "black.bmp"
    PIL.Image.new("RGB", (512, 512)).save(image)
    with image.open("rb+") as file:
        file.seek(64 * 1024)
        file.truncate()  # what follows becomes a hole
        file.truncate(512 * 512 * 3 + 54)
    (tmp_path / "same.bmp").hardlink_to(image)
    (tmp_path / "1.png").write_bytes(png(1))
    names = ["1.png", "black.bmp", "same.bmp"]
    for format in ("gnu", "posix"):
        command = ["tar", f"--format={format}", "--sparse", "-cf", "a.tar", *names]
        subprocess.run(command, cwd=tmp_path, check=True)
        reasons = {source.path: source.error for source in find([str(tmp_path / "a.tar")])}
        assert [Path(path).name for path in sorted(reasons)] == names
        assert [reason is None for _, reason in sorted(reasons.items())] == [True, False, False]
        assert "stored as a sparse file" in str(reasons[f"{tmp_path}/a.tar/black.bmp"])
