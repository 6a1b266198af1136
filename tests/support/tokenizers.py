"""A folder of tokenizer files, as the runtime's codec sees an artifact."""

from types import SimpleNamespace

from coldpress.runtime.text.tokenizer import SETTINGS_FILE, TOKENIZER_FILE


class FakeArtifact:
    """An artifact as far as a tokenizer sees it: files in a folder, and the model's bos_token_id."""

    def __init__(self, folder, bos_token_id=0):
        self._folder = folder
        names = [name for name in (TOKENIZER_FILE, SETTINGS_FILE) if (folder / name.rpartition("/")[2]).exists()]
        self.manifest = SimpleNamespace(
            files=[SimpleNamespace(path=name) for name in names], model=SimpleNamespace(bos_token_id=bos_token_id)
        )

    def read_bytes(self, name, max_bytes):
        """The file, if it is small enough."""
        assert (self._folder / name.rpartition("/")[2]).stat().st_size <= max_bytes
        return (self._folder / name.rpartition("/")[2]).read_bytes()
