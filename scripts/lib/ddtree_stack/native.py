"""Which paths of upstream's tree end up in its binaries."""

from __future__ import annotations

from pathlib import PurePosixPath

_FOLDERS = {"csrc", "cmake", "rust"}
_NAMES = {"CMakeLists.txt", "setup.py", "rust-toolchain.toml", "Cargo.toml", "Cargo.lock"}
_SUFFIXES = {
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".hip", ".inl"),
    *(".cmake", ".rs", ".so", ".pyx", ".asm", ".S"),
}


def is_native(path: str) -> bool:
    """Would a change of this file need a compiler?"""
    p = PurePosixPath(path)
    return p.parts[0] in _FOLDERS or p.name in _NAMES or p.suffix in _SUFFIXES
