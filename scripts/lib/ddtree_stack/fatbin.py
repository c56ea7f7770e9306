"""Which GPUs a shared library holds code for, read from its fat binaries.

What `cuobjdump --list-elf --list-ptx` lists, without the CUDA toolkit. An ELF section `.nv_fatbin`
is a row of containers; each has a header and, one after the other, images with headers of their
own: PTX (kind 1) or machine code (kind 2), with the compute capability it is for.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, bytes that follow it
_MAGIC = 0xBA55ED50
_IMAGE = struct.Struct("<HHIQ12xI")  # kind, flags, size of this header, bytes that follow it, arch
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


class BadFatbin(ValueError):
    """The bytes are no fat binary, or end early."""


@dataclass
class Code:
    """Number of images by compute capability: 90 is sm_90, with or without its `a`."""

    sm: Counter[int] = field(default_factory=Counter)
    ptx: Counter[int] = field(default_factory=Counter)

    def add(self, other: Code) -> None:
        self.sm += other.sm
        self.ptx += other.ptx


def sections(elf: bytes) -> list[bytes]:
    """The sections of a 64-bit little-endian ELF file that hold fat binaries."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise BadFatbin("no 64-bit little-endian ELF file")
    try:
        (table,) = struct.unpack_from("<Q", elf, 40)
        size, count, names_at = struct.unpack_from("<HHH", elf, 58)
        # name, type, flags, address, offset, size
        rows = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
        names = rows[names_at][4] if rows else 0
        found = []
        for name, _, _, _, offset, length in rows:
            at = names + name
            if elf[at : elf.index(b"\0", at)] in _SECTIONS:
                found.append(elf[offset : offset + length])
        return found
    except (struct.error, IndexError) as err:
        raise BadFatbin(f"a damaged ELF file: {err}") from err


def read_section(data: bytes) -> Code:
    """The images of a section."""
    code, at = Code(), 0
    while at + _CONTAINER.size <= len(data):
        magic, _, header, size = _CONTAINER.unpack_from(data, at)
        if magic == 0:  # padding between containers
            at += 8
            continue
        if magic != _MAGIC:
            raise BadFatbin(f"no fat binary at offset {at}")
        at += header
        end = at + size
        if end > len(data):
            raise BadFatbin(f"a fat binary ends {end - len(data)} bytes after its section")
        while at + _IMAGE.size <= end:
            kind, _, header, size, arch = _IMAGE.unpack_from(data, at)
            if not header:
                raise BadFatbin(f"no image at offset {at}")
            if kind in (1, 2):
                (code.ptx if kind == 1 else code.sm)[arch] += 1
            at += header + size
        at = end
    return code


def read(elf: bytes) -> Code:
    """All code for GPUs in a shared library; empty if there is none."""
    code = Code()
    for section in sections(elf):
        code.add(read_section(section))
    return code
