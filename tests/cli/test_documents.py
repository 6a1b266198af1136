"""The references are what the commands print, and what the package's docstrings say."""

import inspect

import coldpress
from tools import command_documents, python_documents


def test_the_reference_is_up_to_date() -> None:
    assert command_documents.FILE.read_text(encoding="utf-8") == command_documents.document()


def test_the_reference_of_python_is_up_to_date() -> None:
    assert python_documents.FILE.read_text(encoding="utf-8") == python_documents.document()


def test_the_reference_of_python_has_every_public_name_with_its_parameters() -> None:
    """By the interpreter's own view of the package, which the generator does not use."""
    text = python_documents.FILE.read_text(encoding="utf-8")
    names = [name for name in coldpress.__all__ if not name.startswith("__")]
    methods = [name for name, _ in inspect.getmembers(coldpress.Model) if not name.startswith("_")]
    for title in (*names, *(f"Model.{method}" for method in methods)):
        assert f" coldpress.{title}\n" in text, title
    for function in (coldpress.load, coldpress.build, coldpress.quote, coldpress.Model.generate):
        section = text.partition(f" coldpress.{function.__qualname__}\n")[2].partition("\n#")[0]
        for parameter in inspect.signature(function).parameters:
            assert parameter == "self" or f"{parameter}" in section, (function, parameter)
