"""Presents a folder of tokenizer files as an artifact to the runtime's tokenizer."""

from types import SimpleNamespace

from coldpress.runtime.text.chat import SETTINGS_FILE
from coldpress.runtime.text.process import TOKENIZER_FILE


class FakeArtifact:
    """The part of an artifact that a tokenizer uses: files in a folder, and the model's bos_token_id."""

    def __init__(self, folder, bos_token_id=0):
        self._folder = folder
        names = [name for name in (TOKENIZER_FILE, SETTINGS_FILE) if (folder / name.rpartition("/")[2]).exists()]
        self.manifest = SimpleNamespace(
            files=[SimpleNamespace(path=name) for name in names],
            model=SimpleNamespace(bos_token_id=bos_token_id, vocab_size=1 << 22),
        )

    def read_bytes(self, name, max_bytes):
        """Returns the bytes of a file, which must be at most `max_bytes`."""
        assert (self._folder / name.rpartition("/")[2]).stat().st_size <= max_bytes
        return (self._folder / name.rpartition("/")[2]).read_bytes()
