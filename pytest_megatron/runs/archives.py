"""Unpacks the logs of an artifact, zip or tar, into a directory of our own: nothing else, safely.

An artifact is untrusted. A name that leads out of the directory, a link, a device, more files or
bytes than any run leaves are refused, with one error and before anything is judged.
"""

from __future__ import annotations

import functools
import gzip
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, NamedTuple

from pytest_megatron.errors import TriageError

MOST_BYTES = 8 << 30
MOST_FILES = 100_000
MOST_RATIO = 200  # of sizes; text packs to a hundredth, a bomb to a thousandth (deflate's limit)
_RATIO_FROM_BYTES = 64 << 20
_COPY_BYTES = 1 << 20
_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".gz")


class _Member(NamedTuple):
    """One file of an archive, as listed in its table."""

    name: str
    num_bytes: int
    num_packed: int | None
    is_file: bool
    is_directory: bool
    open: Callable[[], IO[bytes] | None]


def is_archive(path: Path) -> bool:
    """Return true if `unpack` reads a file of that name."""
    return path.name.lower().endswith(_SUFFIXES)


def unpack(path: Path, target: Path, is_wanted: Callable[[PurePath], bool]) -> None:
    """Unpack members of an archive.

    Args:
        path: A zip, a tar, packed or not, or one packed log.
        target: A directory of our own, which is there and empty.
        is_wanted: Which members to unpack, by their names.

    Raises:
        TriageError: It cannot be read, or holds files that no run leaves. Nothing outside of
            `target` was touched.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                members = _checked(path, _members_of_zip(packed))
                _unpack(path, target, [m for m in members if is_wanted(PurePosixPath(m.name))])
        elif tarfile.is_tarfile(path):
            with tarfile.open(path) as tar:
                members = _checked(path, _members_of_tar(tar))
                _unpack(path, target, [m for m in members if is_wanted(PurePosixPath(m.name))])
        elif path.name.lower().endswith(".gz"):
            with gzip.open(path) as stream:
                most = max(_RATIO_FROM_BYTES, path.stat().st_size * MOST_RATIO)
                _copy(stream, target / path.name[: -len(".gz")], path, min(most, MOST_BYTES))
        else:
            raise TriageError(str(path), "is no zip and no tar, in spite of its name")
    except (OSError, EOFError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as e:
        raise TriageError(str(path), f"cannot be unpacked: {e}") from e


def _members_of_zip(packed: zipfile.ZipFile) -> Iterator[_Member]:
    """Yield the members of a zip."""
    for info in packed.infolist():
        kind, is_directory = (info.external_attr >> 16) & 0o170000, info.is_dir()
        yield _Member(
            name=info.filename,
            num_bytes=info.file_size,
            num_packed=info.compress_size,
            is_file=not is_directory and kind in (0, 0o100000),
            is_directory=is_directory,
            open=functools.partial(packed.open, info),
        )


def _members_of_tar(tar: tarfile.TarFile) -> Iterator[_Member]:
    """Yield the members of a tar, whose table is read on the way."""
    for info in tar:
        yield _Member(
            name=info.name,
            num_bytes=info.size,
            num_packed=None,
            is_file=info.isreg(),
            is_directory=info.isdir(),
            open=functools.partial(tar.extractfile, info),
        )


def _checked(path: Path, members: Iterable[_Member]) -> list[_Member]:
    """Return the files of an archive that holds plain files of a likely size, within itself.

    Raises:
        TriageError: It does not; of one that holds too much no more is read than tells so.
    """
    files: list[_Member] = []
    seen: set[PurePosixPath] = set()
    num_bytes = 0
    for number, member in enumerate(members):
        num_bytes += member.num_bytes
        if number >= MOST_FILES or num_bytes > MOST_BYTES:
            raise TriageError(
                str(path),
                f"holds {number} files of {num_bytes} bytes or more, expected at most {MOST_FILES} "
                f"of {MOST_BYTES}; unpack what is needed by hand and give the directory",
            )
        name = PurePosixPath(member.name)
        where, problem = f"{path}!{member.name}", None
        if name.is_absolute() or ".." in name.parts or "\\" in member.name or "\0" in member.name:
            problem = "leads out of the archive, expected a name within it"
        elif not member.name.isprintable():
            where = f"{path}!{member.name!r}"
            problem = "is a name with control characters, expected plain text"
        elif member.is_file and name in seen:
            problem = "is there twice, expected every name once"
        elif not member.is_file and not member.is_directory:
            problem = "is a link or a device, expected plain files only"
        if problem is not None:
            raise TriageError(where, problem)
        seen.add(name)
        files += [member] * member.is_file
    return files


def _unpack(path: Path, target: Path, members: Sequence[_Member]) -> None:
    """Unpack files of an archive, within the limits."""
    _refuse_bomb(path, members, target)
    left = MOST_BYTES
    for member in members:
        place = target.joinpath(*PurePosixPath(member.name).parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        stream = member.open()
        assert stream is not None  # it is a file
        with stream:
            left -= _copy(stream, place, path, min(left, member.num_bytes))


def _refuse_bomb(path: Path, wanted: Sequence[_Member], target: Path) -> None:
    """Check that the unpacked files are of a likely size and fit on the disk.

    Raises:
        TriageError: It is not, or does not.
    """
    num_bytes = sum(member.num_bytes for member in wanted)
    sizes = [m.num_packed for m in wanted if m.num_packed is not None]
    num_packed = sum(sizes) if len(sizes) == len(wanted) else path.stat().st_size  # a tar's
    if num_bytes > _RATIO_FROM_BYTES and num_packed * MOST_RATIO < num_bytes:
        raise TriageError(
            str(path), f"unpacks {num_packed} bytes to {num_bytes}, which no log does; not unpacked"
        )
    num_free = shutil.disk_usage(target).free
    if num_bytes > num_free:
        raise TriageError(
            str(path),
            f"unpacks to {num_bytes} bytes, {target} has {num_free} left; point TMPDIR elsewhere",
        )


def _copy(stream: IO[bytes] | gzip.GzipFile, place: Path, path: Path, most: int) -> int:
    """Write a member; return its size.

    Raises:
        TriageError: It is longer than listed in the archive.
    """
    num_bytes = 0
    with place.open("xb") as file:
        while piece := stream.read(_COPY_BYTES):
            num_bytes += len(piece)
            if num_bytes > most:
                raise TriageError(f"{path}!{place.name}", f"is longer than {most} bytes; refused")
            file.write(piece)
    shutil.copymode(path, place)
    return num_bytes
