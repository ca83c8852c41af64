"""What `abi.h` declares, as Python sees it: numbers, structures, and what each kernel is called with."""

import ctypes
import re
from pathlib import Path
from typing import Any

_TEXT = re.sub(r"//.*", "", Path(__file__).with_name("abi.h").read_text(encoding="utf-8"))
NUMBERS: dict[str, int] = {  # of every enumeration
    name.strip(): number
    for names in re.findall(r"enum \w+ \{(.*?)\}", _TEXT, re.DOTALL)
    for number, name in enumerate(names.split(","))
}
_TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
}


def _type(declared: str) -> Any:
    """Of a field or an argument; whatever it points to, an address."""
    return ctypes.c_void_p if "*" in declared else _TYPES[declared.split()[0]]


def _structure(name: str, fields: str) -> Any:
    declared = [
        (re.findall(r"\w+", field)[-1], _type(line))
        for line in fields.split(";")[:-1]
        for field in line.split(",")
    ]
    return type(name, (ctypes.Structure,), {"_fields_": declared})


for _name, _fields in re.findall(r"struct (\w+) \{(.*?)\};", _TEXT, re.DOTALL):
    _TYPES[_name] = _structure(_name, _fields)


def struct(name: str) -> Any:
    """The ctypes class of a structure; `struct(...)(field=...)` makes one."""
    return _TYPES[name]


def _argument(declared: str) -> Any:
    """A structure is given as itself, any other memory as its address."""
    pointed = re.search(r"Kvq\w+(?=\*)", declared)
    return ctypes.POINTER(_TYPES[pointed[0]]) if pointed else _type(declared)


KERNELS: dict[str, list[Any]] = {  # the types of their arguments
    name: [_argument(argument) for argument in arguments.split(",")]
    for name, arguments in re.findall(r"KVQ_KERNEL\((\w+)\)\((.*?)\);", _TEXT, re.DOTALL)
}
