"""The reference of the commands is what they print."""

from coldpress.cli import command_documents


def test_the_reference_is_up_to_date() -> None:
    assert command_documents.FILE.read_text(encoding="utf-8") == command_documents.document()
