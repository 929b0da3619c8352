"""Reads what is installed in an environment, from metadata and shared objects; imports nothing."""

from __future__ import annotations

import ast
import importlib.metadata
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from pytest_megatron.base.files import JsonValue, parse_json
from pytest_megatron.doctor.facts import Compiled, Extension, Package, Shadow

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian
_DYNAMIC, _DYNSYM = 6, 11
_NEEDED = 1
_SYMBOL, _ENTRY = struct.Struct("<IBBHQQ"), struct.Struct("<qQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedObject:
    """Libraries and symbols of one file; all empty if it is no ELF64 file.

    Attributes:
        needed: Names of libraries: `libcudart.so.12`.
        missing: Symbols that others must define.
        defined: Symbols that it offers.
    """

    needed: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()
    defined: frozenset[str] = frozenset()


def read_shared_object(path: Path, prefix: str = "") -> SharedObject:
    """Read libraries and symbols of a shared object.

    Args:
        path: The file.
        prefix: Symbols that begin otherwise are left out.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data, prefix.encode())
    except (OSError, ValueError, OverflowError, struct.error, IndexError):
        return SharedObject()  # empty, cut short, or something else


def _parse(data: mmap.mmap, prefix: bytes) -> SharedObject:
    """Read needed libraries and symbols of an ELF file."""
    if data[: len(_MAGIC)] != _MAGIC:
        return SharedObject()
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [_SECTION.unpack_from(data, offset + i * size) for i in range(count)]
    needed: list[str] = []
    missing: set[str] = set()
    defined: set[str] = set()
    for _, kind, _, _, start, length, link, _, _, _ in sections:
        if kind not in (_DYNAMIC, _DYNSYM):
            continue
        texts = sections[link][4]
        block = data[start : start + length]
        if kind == _DYNAMIC:
            needed += [_text(data, texts + at).decode() for at in _needed(block)]
        else:
            for at, place in _symbols(block):
                name = _text(data, texts + at)
                if name.startswith(prefix):
                    (defined if place else missing).add(name.decode(errors="replace"))
    return SharedObject(
        needed=tuple(needed), missing=frozenset(missing), defined=frozenset(defined)
    )


def _needed(block: bytes) -> Iterator[int]:
    """Yield offsets of the names of libraries that an ELF file needs."""
    for tag, value in _ENTRY.iter_unpack(block[: len(block) // _ENTRY.size * _ENTRY.size]):
        if tag == _NEEDED:
            yield value


def _symbols(block: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the name of each symbol is, and the section that defines it, 0 for none."""
    for name, _, _, section, _, _ in _SYMBOL.iter_unpack(block):
        if name:
            yield name, section


def _text(data: mmap.mmap, at: int) -> bytes:
    return data[at : data.find(b"\0", at)]


# Where torch defines what its extensions need; a symbol of these that is not there is never there.
_OWN_SYMBOLS = re.compile(r"_ZNK?3c10(5Error|6detail|4cuda)")
_OLD_STRING, _NEW_STRING = re.compile(r"_ZN3c105ErrorC[12]E.*Ss$"), "NSt7__cxx1112basic_string"
_CUDA_LIBRARY = re.compile(r"lib(?:cudart|cublas|cublasLt|nvrtc)\.so\.(\d+)")
_ASSIGNED = re.compile(r"^(\w+)\s*(?::[^=\n]+)?=\s*(.+)$", re.MULTILINE)


def read_packages(
    paths: Iterable[Path],
) -> tuple[dict[str, Package], dict[str, tuple[Package, ...]]]:
    """Return the packages by name, each the first on the path, and those that are there again.

    The latter by name, first the one that is found; in one directory that is a broken installation,
    in several it is one environment on top of another.
    """
    found: dict[str, Package] = {}
    doubles: dict[str, list[Package]] = {}
    for path in dict.fromkeys(p.resolve() for p in paths):
        for distribution in importlib.metadata.distributions(path=[str(path)]):
            package = _package(distribution, path)
            if package is None:
                continue
            found.setdefault(package.name, package)
            doubles.setdefault(package.name, []).append(package)
    return found, {name: tuple(many) for name, many in doubles.items() if len(many) > 1}


def _package(distribution: importlib.metadata.Distribution, path: Path) -> Package | None:
    """Return the metadata of a distribution, None for what an installation left."""
    metadata = distribution.metadata
    name, version = metadata["Name"], metadata["Version"]
    if not name or not version:
        return None  # a directory that an installation left behind
    wheel = distribution.read_text("WHEEL") or ""
    return Package(
        name=canonicalize_name(str(name)),
        version=str(version),
        location=path,
        tags=tuple(re.findall(r"^Tag: *(\S+)", wheel, re.MULTILINE)),
        requires=tuple(distribution.requires or ()),
        requires_python=metadata["Requires-Python"],
        editable=_editable(distribution.read_text("direct_url.json")),
    )


def read_direct_url(text: str | None) -> dict[str, JsonValue]:
    """Return the content of a `direct_url.json`; empty if there is none, or it is no mapping."""
    # Source: PyPA specifications, Recording the Direct URL Origin of installed distributions.
    try:
        value = parse_json(text or "null")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _editable(text: str | None) -> Path | None:
    """Return the checkout that a package is installed from, None where its files were copied."""
    found = read_direct_url(text)
    url, directory = found.get("url"), found.get("dir_info")
    is_editable = isinstance(directory, dict) and bool(directory.get("editable"))
    return Path(unquote(urlsplit(url).path)) if is_editable and isinstance(url, str) else None


def read_extensions(paths: Iterable[Path], compiled: Iterable[Compiled]) -> Iterator[Extension]:
    """Yield the shared objects of packages that are compiled against torch."""
    directories = list(dict.fromkeys(p.resolve() for p in paths))
    for row in compiled:
        for directory in directories:
            for pattern in row.objects:
                for file in sorted(directory.glob(pattern)):
                    yield _extension(row.name, file)


def _extension(package: str, file: Path) -> Extension:
    """Return what a compiled module asks of CUDA and C++."""
    read = read_shared_object(file, prefix="_Z")
    majors = {match[1] for name in read.needed if (match := _CUDA_LIBRARY.match(name))}
    own = {symbol for symbol in read.missing if _OWN_SYMBOLS.match(symbol)}
    abi = None
    if any(_OLD_STRING.match(symbol) for symbol in own):
        abi = False
    elif any(_NEW_STRING in symbol for symbol in own):
        abi = True
    return Extension(
        package=package,
        file=file,
        cuda_major=min(majors) if majors else None,
        abi=abi,
        missing=frozenset(own),
    )


def torch_symbols(directory: Path) -> frozenset[str]:
    """Return the symbols of c10 that a torch defines; none where they cannot be read."""
    libraries = ("libc10.so", "libc10_cuda.so", "libtorch_cpu.so", "libtorch_cuda.so")
    reads = (read_shared_object(directory / "lib" / name, "_Z") for name in libraries)
    return frozenset(s for read in reads for s in read.defined if _OWN_SYMBOLS.match(s))


def torch_version_file(directory: Path) -> Mapping[str, str | None]:
    """Return what `torch/version.py` assigns, without running it."""
    try:
        text = (directory / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, str | None] = {}
    for name, value in _ASSIGNED.findall(text):
        try:
            literal: object = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue
        if literal is None or isinstance(literal, str):
            found[name] = literal
    return found


def find_shadows(
    paths: Iterable[Path], packages: Mapping[str, Package], compiled: Iterable[Compiled]
) -> Iterator[Shadow]:
    """Yield what is imported in place of torch, numpy and packages compiled against torch.

    Where torch is not installed at all, a directory of that name is taken for it.
    """
    directories = list(dict.fromkeys(path.resolve() for path in paths))
    wanted = [("torch", "torch"), ("numpy", "numpy")]
    for row in compiled:
        tops = dict.fromkeys(module.partition(".")[0] for module in row.modules)
        wanted += [(name, top) for name in (row.name, *row.also) for top in tops]
    for name, module in wanted:
        package = packages.get(name)
        found = _find_module(directories, module)
        if found is None or (package is not None and package.editable is not None):
            continue
        if package is None:
            if module == "torch" and not (found / "lib").is_dir():
                yield Shadow(module=module, path=found)
        elif found.parent != package.location and _module_in(package.location, module):
            yield Shadow(module=module, path=found, package=package)


def _find_module(directories: Iterable[Path], name: str) -> Path | None:
    """Return what an import finds: a package or a module, else a directory without code."""
    bare = None
    for directory in directories:
        if (found := _module_in(directory, name)) is not None:
            return found
        if bare is None and (directory / name).is_dir():
            bare = directory / name
    return bare


def _module_in(directory: Path, name: str) -> Path | None:
    """Return the file or folder of a module in a directory, None without one."""
    if (directory / name / "__init__.py").is_file():
        return directory / name
    files = (*sorted(directory.glob(f"{name}.*so")), directory / f"{name}.py")
    return next((file for file in files if file.is_file()), None)


def find_megatrons(paths: Iterable[Path], packages: Mapping[str, Package]) -> tuple[Path, ...]:
    """Return the directories that `megatron.core` would be imported from, the first one wins."""
    checkout = packages["megatron-core"].editable if "megatron-core" in packages else None
    places = [*paths, *([checkout] if checkout is not None else [])]
    found = dict.fromkeys(path.resolve() for path in places)
    return tuple(path for path in found if (path / "megatron/core/__init__.py").is_file())
