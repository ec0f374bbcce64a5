"""Content digests of Python objects: equal for equal classes, weights and rows.

The content of a class is its code and values, those of its bases, and everything that its functions use, down
to installed packages, which count by name. Comments, line numbers and docstrings do not count.
"""

import dataclasses
import dis
import hashlib
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from fedfrozen_app.core.digests import raw_bytes
from fedfrozen_app.core.own_objects import is_own

Tokens = Iterator[str | bytes]
SKIPPED = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__"}
SKIPPED |= {"__firstlineno__", "__static_attributes__", "__dataclass_fields__", "__dataclass_params__"}
SKIPPED |= {"__abstractmethods__", "_abc_impl", "__match_args__"}
PLAIN = (type(None), bool, int, float, complex, str, bytes)


def digest_of_class(thing: type) -> str:
    return hashed(_class(thing, set()))


def digest_of_module(module: nn.Module) -> str:
    return hashed(_module(module))


def hashed(tokens: Tokens) -> str:
    found = hashlib.sha256()
    for token in tokens:
        data = token if isinstance(token, bytes) else token.encode()
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def _module(module: nn.Module) -> Tokens:
    seen: set[int] = set()
    for name, part in module.named_modules():
        yield f"module {name} {part.extra_repr()}"
        yield from _class(type(part), seen)
        if is_own(type(part).__module__):
            own = {key: value for key, value in vars(part).items() if not key.startswith("_")}
            yield from _value({key: value for key, value in own.items() if key != "training"}, seen)
        elif hasattr(part, "config"):
            yield str(part.config)  # of transformers: written sorted
    for name, array in (*module.named_parameters(), *module.named_buffers()):
        yield f"array {name} {array.dtype} {tuple(array.shape)}"
        yield b"" if array.is_meta else raw_bytes(array)


def _class(thing: type, seen: set[int]) -> Tokens:
    yield f"class {thing.__qualname__}"
    if id(thing) in seen:
        return
    seen.add(id(thing))
    for base in thing.__mro__[:-1]:
        if not is_own(base.__module__):
            yield f"base {base.__module__}.{base.__qualname__}"
            continue
        yield f"own base {base.__qualname__}"
        for name, value in sorted(vars(base).items()):
            if name not in SKIPPED:
                yield f"member {name}"
                yield from _value(value, seen)
        for one in dataclasses.fields(base) if dataclasses.is_dataclass(base) else ():
            yield f"field {one.name} {one.type}"
            yield from _value(one.default_factory if _is_missing(one.default) else one.default, seen)


def _is_missing(value: Any) -> bool:
    return value is dataclasses.MISSING


def _function(thing: FunctionType, seen: set[int]) -> Tokens:
    if not is_own(thing.__module__ or "") and thing.__module__ is not None:
        yield f"function {thing.__module__}.{thing.__qualname__}"
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    yield from _code(thing.__code__, thing.__doc__, seen)
    yield from _value([thing.__defaults__, thing.__kwdefaults__], seen)
    for cell in thing.__closure__ or ():
        yield from _value(_content(cell), seen)
    for name in sorted(_globals_of(thing.__code__)):
        if name in thing.__globals__:
            yield f"global {name}"
            yield from _value(thing.__globals__[name], seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty: a class that refers to itself
        return None


def _code(code: CodeType, doc: str | None, seen: set[int]) -> Tokens:
    yield code.co_code
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        yield " ".join(names)
    for place, constant in enumerate(code.co_consts):
        if isinstance(constant, CodeType):
            yield from _code(constant, None, seen)
        elif place or constant != doc:
            yield from _value(constant, seen)


def _globals_of(code: CodeType) -> set[str]:
    found = {
        str(one.argval)
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and one.argval
    }
    return found.union(*(_globals_of(one) for one in code.co_consts if isinstance(one, CodeType)))


def _value(thing: Any, seen: set[int]) -> Tokens:
    if isinstance(thing, PLAIN):
        yield f"{type(thing).__name__} {thing!r}"
    elif isinstance(thing, (list, tuple)):
        yield f"{type(thing).__name__} of {len(thing)}"
        for one in thing:
            yield from _value(one, seen)
    elif isinstance(thing, (set, frozenset)):
        yield "set"
        yield from sorted(hashed(_value(one, set())) for one in thing)
    elif isinstance(thing, Mapping):
        yield f"mapping of {len(thing)}"
        for key in sorted(thing, key=repr):
            yield from _value(key, seen)
            yield from _value(thing[key], seen)
    elif isinstance(thing, (staticmethod, classmethod)):
        yield type(thing).__name__
        yield from _value(thing.__func__, seen)
    elif isinstance(thing, property):
        yield from _value([thing.fget, thing.fset], seen)
    elif isinstance(thing, FunctionType):
        yield from _function(thing, seen)
    elif isinstance(thing, type):
        own = is_own(thing.__module__)
        yield from _class(thing, seen) if own else iter([f"{thing.__module__}.{thing.__qualname__}"])
    elif isinstance(thing, np.ndarray):
        yield f"array {thing.dtype} {thing.shape}"
        yield repr(thing.tolist()) if thing.dtype.hasobject else thing.tobytes()
    elif isinstance(thing, torch.Tensor):
        yield f"array {thing.dtype} {tuple(thing.shape)}"
        yield raw_bytes(thing)
    elif isinstance(thing, ModuleType):
        yield f"package {thing.__name__}"
    else:
        yield from _instance(thing, seen)


def _instance(thing: Any, seen: set[int]) -> Tokens:
    """The attributes of an instance of a user-defined class; for other classes the repr, if without an
    address."""
    yield f"a {type(thing).__module__}.{type(thing).__qualname__}"
    if is_own(type(thing).__module__) and id(thing) not in seen:
        seen.add(id(thing))
        yield from _class(type(thing), seen)
        yield from _value(getattr(thing, "__dict__", {}), seen)
    elif " at 0x" not in (text := repr(thing)):
        yield text
