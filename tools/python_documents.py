"""Writes docs/reference/python.md: the public names of the package, from their signatures and docstrings.

    python -m tools.python_documents [--fix]

griffe reads the source, so that nothing is imported and the texts below fields count, too. Without `--fix` it ends with
code 1 if the file is not up to date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

import coldpress

FILE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "python.md"
HEAD = """# Python

Made by `python -m tools.python_documents --fix`. `import coldpress` is quick: each name loads its part of the
package when it is first used. `build` and `quote` need the extra `compiler`.
"""
WIDTH = 100
"""Characters from which on a signature has one parameter a line."""
MARKS: dict[griffe.ParameterKind | None, str] = {
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
}
Callable = griffe.Function | griffe.Class


def document() -> str:
    """Returns the page."""
    parts, package = [HEAD], griffe.load("coldpress", docstring_parser="google")
    for name in coldpress.__all__:
        if not name.startswith("__"):
            parts += _described(_found(package, name), f"coldpress.{name}", "##")
    return "\n".join(parts)


def _found(package: griffe.Object | griffe.Alias, name: str) -> Callable:
    """Returns what a public name stands for."""
    found = package[f"{coldpress._MODULES[name].partition('.')[2]}.{name}"]
    if found.is_alias:
        found = found.final_target
    if not isinstance(found, griffe.Function | griffe.Class):
        raise TypeError(f"coldpress.{name} is neither a function nor a class")
    return found


def _described(item: Callable, title: str, heading: str) -> Iterator[str]:
    """Yields the parts of a function's or a class's section."""
    yield f"{heading} {title}\n"
    if isinstance(item, griffe.Function):
        yield f"```python\n{_signature(item, title.rpartition('.')[2])}\n```\n"
        yield from _explained(item)
        return
    yield from _explained(item)
    init = item.members.get("__init__")
    if isinstance(init, griffe.Function):
        yield f"```python\n{_signature(init, item.name)}\n```\n"
        yield from _explained(init)
    public = {name: one for name, one in item.members.items() if not name.startswith("_")}
    fields = [one for one in public.values() if isinstance(one, griffe.Attribute) and "property" not in one.labels]
    if fields:
        yield "".join(f"- `{one.name}`: `{one.annotation}`{_after_colon(one)}\n" for one in fields)
    for one in public.values():
        if isinstance(one, griffe.Function):
            yield from _described(one, f"{title}.{one.name}", "###")
        elif isinstance(one, griffe.Attribute) and "property" in one.labels:
            yield f"### {title}.{one.name}\n\n```python\n{one.name}: {one.annotation}\n```\n"
            yield from _explained(one)


def _signature(function: griffe.Function, name: str) -> str:
    """Returns a function's signature without `self`, on one line if it is short."""
    of_class = isinstance(function.parent, griffe.Class)
    words, star = list[str](), False
    for one in list(function.parameters)[of_class:]:
        kind = one.kind
        if kind is griffe.ParameterKind.keyword_only and not star:
            words.append("*")
            star = True
        mark = MARKS.get(kind, "")
        typed = f": {one.annotation}" if one.annotation is not None else ""
        default = f" = {one.default}" if one.default is not None and not mark else ""
        words.append(f"{mark}{one.name}{typed}{default}")
    end = f" -> {function.returns}" if function.returns is not None and function.name != "__init__" else ""
    line = f"{name}({', '.join(words)}){end}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"


def _explained(item: griffe.Object) -> Iterator[str]:
    """Yields the parts of a docstring."""
    for section in item.docstring.parsed if item.docstring else ():
        if isinstance(section, griffe.DocstringSectionText):
            yield f"{section.value}\n"
        elif isinstance(section, griffe.DocstringSectionParameters):
            yield "".join(f"- `{one.name}`: {_line(one.description)}\n" for one in section.value)
        elif isinstance(section, griffe.DocstringSectionReturns):
            yield "".join(f"Returns: {_line(one.description)}\n" for one in section.value)
        elif isinstance(section, griffe.DocstringSectionRaises):
            yield "".join(f"Raises `{one.annotation}` {_line(one.description)}\n" for one in section.value)
        else:
            raise TypeError(f"{item.path}: a section of the kind {section.kind.value} in a docstring")


def _after_colon(item: griffe.Attribute) -> str:
    return f": {_line(item.docstring.value)}" if item.docstring else ""


def _line(text: str) -> str:
    """Returns a text on one line."""
    return " ".join(text.split())


def main(argv: list[str]) -> int:
    """Writes or checks the page; returns the exit code."""
    text = document()
    if argv == ["--fix"]:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.exists() and FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{FILE} is not up to date; run python -m tools.python_documents --fix", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
