"""Edits JSON: one value or key anywhere in it, or its text."""

import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STRANGE: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 31, 255, 4096, 65536, 10**6, 10**9, 2**31, 2**32, 2**53 - 1, 2**53, 2**63, 10**30),
    *(0.0, -0.0, 0.5, 1.5, -2.5, 1e-320, 5e-324, 1e308, 3.5e38, float("nan"), float("inf")),
    *(
        True,
        False,
        None,
        "",
        "x",
        "0",
        "1e9",
        "../x",
        "/dev/zero",
        "a/b",
        "con",
        ".",
        "x" * 300,
        "é",
        "\u202e",
        "\ud800",
    ),
    *("a\nerror: b", "\x1b[2Jx", "\0", "%s{0}{x}", "y" * 100_000),
    *([], {}, [[]], [0], [1, 2, 3], {"a": 1}, [None], ["x"], [[1]], [-1], [2**53]),
)
KEYS = ("x", "", "a.b", "\x1b[31mred", "a\nb", "k" * 5000, "__class__", "é", "type", "name")
MANY = 20_000
"""A number of entries or keys that a reader must still refuse quickly."""


class Unfit(Exception):
    """Raised if an edit does not apply to the state that earlier edits left."""


def regular(path: Path) -> Path:
    """Returns `path` if an edit may read and write it; raises Unfit if it is not a regular file of the mutant."""
    if path.is_symlink() or not path.is_file():
        raise Unfit
    return path


def strange(chance: random.Random, like: Any = None) -> Any:
    """Returns a value of any kind, but mostly one close to `like` if that is a number or a text."""
    if isinstance(like, int) and not isinstance(like, bool) and chance.random() < 0.6:
        return chance.choice((like + 1, like - 1, 2 * like, like // 2, -like, like * 1000, like + 4096, like + 0.5))
    if isinstance(like, float) and chance.random() < 0.6:
        return chance.choice((-like, like * 2, like / 2, like * 1e30, like * 1e-30, like + 1))
    if isinstance(like, str) and like and chance.random() < 0.5:
        at = chance.randrange(len(like))
        letter = chance.choice("a0/.\\\n\x1b\u202e é{}")
        return chance.choice((like[:at] + letter + like[at:], like[:at], like.upper(), like * 30, like + " "))
    return copy.deepcopy(chance.choice(STRANGE))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the path of every value inside `value`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, ...]] = []
    for key, below in inner:
        found += [(*path, key), *places(below, (*path, key))]
    return found


def pick(value: Any, chance: random.Random) -> tuple[Any, ...]:
    """Returns a random path; walks down from the top, so that long lists do not hide the values beside them."""
    path: tuple[Any, ...] = ()
    while isinstance(value, dict | list) and value:
        key = chance.choice(sorted(value, key=str) if isinstance(value, dict) else range(len(value)))
        path, value = (*path, key), value[key]
        if chance.random() < 0.15:
            break
    if not path:
        raise Unfit
    return path


def at(value: Any, path: Sequence[Any]) -> Any:
    """Returns the value at a path."""
    for key in path:
        value = value[key]
    return value


def show(path: Sequence[Any]) -> str:
    """Returns a path as text for people."""
    return ".".join(str(key)[:40] for key in path) or "all of it"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)"


def replace(value: Any, chance: random.Random) -> str:
    """Replaces a random value."""
    path = pick(value, chance)
    holder, old = at(value, path[:-1]), at(value, path)
    holder[path[-1]] = strange(chance, old)
    return f"{show(path)}: {_brief(old)} became {_brief(holder[path[-1]])}"


def remove(value: Any, chance: random.Random) -> str:
    """Removes a random key or entry."""
    path = pick(value, chance)
    del at(value, path[:-1])[path[-1]]
    return f"{show(path)} removed"


def add(value: Any, chance: random.Random) -> str:
    """Adds a key, or doubles an entry of a list."""
    path = pick(value, chance)
    holder = at(value, path[:-1])
    if isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(holder[path[-1]]))
        return f"{show(path)} doubled"
    key = chance.choice(KEYS)
    holder[key] = strange(chance)
    return f"{show((*path[:-1], key))} added"


def reorder(value: Any, chance: random.Random) -> str:
    """Reorders a list or cuts it short."""
    lists = [path for path in [(), *places(value)] if isinstance(at(value, path), list) and len(at(value, path)) > 1]
    if not lists:
        raise Unfit
    path = chance.choice(lists)
    entries = at(value, path)
    how = chance.choice(("reversed", "rotated", "shuffled", "cut"))
    if how == "reversed":
        entries.reverse()
    elif how == "rotated":
        entries.append(entries.pop(0))
    elif how == "shuffled":
        chance.shuffle(entries)
    else:
        del entries[chance.randrange(len(entries)) :]
    return f"{show(path)} {how}"


def exchange(value: Any, chance: random.Random) -> str:
    """Exchanges two values of one type."""
    one, other = pick(value, chance), pick(value, chance)
    if one[: len(other)] == other or other[: len(one)] == one or type(at(value, one)) is not type(at(value, other)):
        raise Unfit
    here, there = at(value, one[:-1]), at(value, other[:-1])
    here[one[-1]], there[other[-1]] = there[other[-1]], here[one[-1]]
    return f"{show(one)} and {show(other)} exchanged"


def multiply(value: Any, chance: random.Random) -> str:
    """Adds up to MANY entries to a list or keys to an object; replaces any other value by a list of as many."""
    path = pick(value, chance)
    holder, inner = at(value, path[:-1]), at(value, path)
    count = chance.choice((100, 1000, MANY))
    if isinstance(inner, list):
        entry = copy.deepcopy(inner[0]) if inner else 0
        inner += [entry] * count
    elif isinstance(inner, dict):
        entry = next(iter(inner.values()), 0)
        inner |= {f"k{number}": entry for number in range(count)}
    else:
        holder[path[-1]] = [inner] * count
    return f"{show(path)} has {count} more entries"


def nest(value: Any, chance: random.Random) -> str:
    """Nests a value in up to 900 lists and objects."""
    path = pick(value, chance)
    depth = chance.choice((10, 40, 70, 900))
    inner: Any = at(value, path)
    for _ in range(depth):
        inner = [inner] if chance.random() < 0.7 else {"a": inner}
    at(value, path[:-1])[path[-1]] = inner
    return f"{show(path)} nested {depth} deep"


VALUE_EDITS: dict[Callable[[Any, random.Random], str], int] = {
    **{replace: 12, remove: 3, add: 3, reorder: 2, exchange: 2, multiply: 1, nest: 1}
}


def edit_value(value: Any, chance: random.Random) -> str:
    """Makes one of the edits above in place; returns its description."""
    (edit,) = chance.choices(list(VALUE_EDITS), list(VALUE_EDITS.values()))
    return edit(value, chance)


def dump(value: Any, indent: int | None = None) -> bytes:
    """Returns JSON text, NaN and lone surrogates included, since hostile files may have them."""
    try:
        return json.dumps(value, indent=indent, sort_keys=False).encode()
    except RecursionError as error:
        raise Unfit from error


def edit_text(text: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Returns text that is not JSON any more, or JSON that only some readers accept, and a description."""
    at_byte = chance.randrange(len(text) + 1)
    keys = b",".join(b'"k%d":0' % (number % 10_000) for number in range(chance.choice((2, 300, MANY))))
    choices: dict[str, Callable[[], bytes]] = {
        "a byte order mark": lambda: b"\xef\xbb\xbf" + text,
        "UTF-16": lambda: text.decode("utf-8", "replace").encode("utf-16"),
        "empty": lambda: b"",
        "null": lambda: b"null",
        "a list": lambda: b"[" + text + b"]",
        "900 brackets": lambda: b"[" * 900,
        "100,000 brackets": lambda: b"[" * 100_000,
        "100,000 nested objects": lambda: b'{"a":' * 100_000,
        "duplicate keys": lambda: text.replace(b"{", b'{"x":1,"x":2,', 1),
        "thousands of keys, some twice": lambda: text.replace(b"{", b"{" + keys + b",", 1),
        "an integer of 100,000 digits": lambda: text.replace(b": 1", b": 1" + b"0" * 100_000, 1),
        "a number that overflows": lambda: text.replace(b": 1", b": 1e999", 1),
        "NaN": lambda: text.replace(b"null", b"NaN", 1),
        "a lone surrogate": lambda: text.replace(b'": "', b'": "\\ud800', 1),
        "spaces": lambda: b" " * 10_000 + text + b"\n" * 10_000,
        "a second value": lambda: text + b"{}",
        "a byte that is not UTF-8": lambda: text[:at_byte] + b"\xff" + text[at_byte:],
        "a cut": lambda: text[:at_byte],
    }
    name = chance.choice(list(choices))
    return choices[name](), name
