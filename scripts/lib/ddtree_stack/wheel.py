"""Wheels as bytes: reading the pinned one and writing ours, the same bits on every machine."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def record_digest(data: bytes) -> str:
    """A digest as RECORD spells it."""
    raw = hashlib.sha256(data).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@dataclass
class Entry:
    """One file of a wheel."""

    digest: str
    size: int
    executable: bool
    read: Callable[[], bytes]
    source: zipfile.ZipInfo | None = None  # set when the packed bytes can be copied as they are

    @classmethod
    def of(cls, data: bytes, executable: bool = False) -> Entry:
        return cls(record_digest(data), len(data), executable, lambda: data)


class WheelFile:
    """A wheel of the index, opened for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.zip = zipfile.ZipFile(path)
        names = [n for n in self.zip.namelist() if n.endswith(".dist-info/RECORD")]
        self.info = names[0].split("/", 1)[0]

    def text(self, name: str) -> str:
        """A file of its dist-info folder."""
        return self.zip.read(f"{self.info}/{name}").decode()

    def has(self, name: str) -> bool:
        return f"{self.info}/{name}" in self.zip.NameToInfo

    def entries(self) -> dict[str, Entry]:
        """Everything outside dist-info, with the digests its RECORD gives."""
        record = {r[0]: r for r in csv.reader(io.StringIO(self.text("RECORD"))) if r}
        found = {}
        for info in self.zip.infolist():
            if info.is_dir() or info.filename.startswith(f"{self.info}/"):
                continue
            _, digest, size = record[info.filename]
            mode = info.external_attr >> 16
            found[info.filename] = Entry(
                digest, int(size), bool(mode & 0o111), lambda n=info: self.zip.read(n), info
            )
        return found


def record(entries: dict[str, Entry], info: str) -> bytes:
    """The RECORD of a wheel with these entries."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for name in sorted(entries):
        rows.writerow([name, entries[name].digest, entries[name].size])
    rows.writerow([f"{info}/RECORD", "", ""])
    return out.getvalue().encode()


def _copy_packed(
    src: WheelFile, old: zipfile.ZipInfo, dst: zipfile.ZipFile, new: zipfile.ZipInfo
) -> None:
    """Move a packed entry over as it is: quick for 400 MB of binaries, and no zlib can differ."""
    with src.path.open("rb") as f:
        f.seek(old.header_offset + 26)
        name_len, extra_len = (int.from_bytes(f.read(2), "little") for _ in range(2))
        f.seek(name_len + extra_len, 1)
        new.compress_type, new.CRC = old.compress_type, old.CRC
        new.compress_size, new.file_size = old.compress_size, old.file_size
        fp = dst.fp
        fp.seek(dst.start_dir)
        new.header_offset = fp.tell()
        fp.write(new.FileHeader(zip64=False))
        left = old.compress_size
        while left:
            piece = f.read(min(left, 1 << 20))
            if not piece:
                raise EOFError(f"{src.path} ends early")
            fp.write(piece)
            left -= len(piece)
        dst.start_dir = fp.tell()
        dst.filelist.append(new)
        dst.NameToInfo[new.filename] = new
        dst._didModify = True


def write_wheel(
    path: Path, entries: dict[str, Entry], info: str, source: WheelFile, date: tuple
) -> None:
    """Write the wheel: sorted, one date, Python stored, binaries as upstream packed them."""
    everything = {**entries, f"{info}/RECORD": Entry.of(record(entries, info))}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as dst:
        order = sorted(everything, key=lambda n: (n.startswith(f"{info}/"), n))
        for name in order:
            entry = everything[name]
            zi = zipfile.ZipInfo(name, date)
            zi.create_system = 3
            zi.external_attr = (0o100755 if entry.executable else 0o100644) << 16
            if entry.source is not None and entry.source.compress_size:
                _copy_packed(source, entry.source, dst, zi)
            else:
                dst.writestr(zi, entry.read())


def unpack_entry(entry: Entry, source: WheelFile, target: Path) -> None:
    """Write one entry to disk without holding a big one in memory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.with_name(f".{target.name}.new")
    with temp.open("wb") as f:
        if entry.source is not None:
            with source.zip.open(entry.source) as src:
                shutil.copyfileobj(src, f, 1 << 20)
        else:
            f.write(entry.read())
    temp.chmod(0o755 if entry.executable else 0o644)
    temp.replace(target)
