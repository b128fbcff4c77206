"""libpyparallel through ctypes, with its prototypes read from the public header."""

import ctypes
import re
from pathlib import Path

import pyparallel
from pyparallel import _core

_core.host_identity()  # maps the library that the package itself uses
PACKAGE = Path(pyparallel.__file__).parent
lib = ctypes.CDLL(str(PACKAGE / "lib" / "libpyparallel.so"))

HEADER = (Path(pyparallel.get_include()) / "pyparallel" / "pyparallel.h").read_text()
VALUES = {name: int(value) for name, value in re.findall(r"PYPARALLEL_(\w+) = (\d+)", HEADER)} | {
    "ABI_MAJOR": 1,
    "ABI_MINOR": 0,
}
DEFAULT_TIMEOUT = -1

_SCALARS = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
    "pyparallel_status_t": ctypes.c_int32,
    "pyparallel_dtype_t": ctypes.c_int32,
    "pyparallel_op_t": ctypes.c_int32,
}


def prototypes() -> dict[str, tuple[str, list[str]]]:
    """Every function of the header: its result and parameter types."""
    text = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    found = {}
    for result, name, parameters in re.findall(
        r"PYPARALLEL_API\s+([\w\s*]+?)\s*\b(pyparallel_\w+)\(([^)]*)\);", text
    ):
        types = [
            re.sub(r"\w+$", "", parameter.strip()).strip()
            for parameter in parameters.split(",")
            if parameter.strip() != "void"
        ]
        found[name] = (result.strip(), types)
    return found


for _name, (_result, _types) in prototypes().items():
    function = getattr(lib, _name)
    function.restype = ctypes.c_char_p if "char" in _result else _SCALARS.get(_result)
    function.argtypes = [_SCALARS.get(kind, ctypes.c_void_p) for kind in _types]


class CError(Exception):
    """A status other than ok, with the library's text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{lib.pyparallel_status_name(status).decode()}: {text}")
        self.status, self.text = status, text


def call(name: str, *args: object) -> None:
    status = getattr(lib, f"pyparallel_{name}")(*args)
    if status != 0:
        raise CError(status, lib.pyparallel_last_error().decode())


def pointers(*arrays) -> ctypes.Array:
    """Addresses of numpy arrays, as a C array of pointers."""
    return (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))


def counts(*values: int) -> ctypes.Array:
    return (ctypes.c_uint64 * len(values))(*values)


class Seat:
    """One rank, by handle."""

    def __init__(self, id: bytes, rank: int, size: int, name: bytes = b"c") -> None:
        self.handle = ctypes.c_void_p()
        call("join", id, rank, size, name, 20_000, ctypes.byref(self.handle))
        self.rank, self.size = rank, size

    def __call__(self, name: str, *args: object) -> None:
        call(name, self.handle, *args)


def unique_id() -> bytes:
    id = ctypes.create_string_buffer(128)
    call("get_unique_id", id)
    return id.raw
