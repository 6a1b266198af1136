"""An artifact that speaks, and a server of it."""

import pytest

import coldpress
from tests.support.command_line import speaking_artifact
from tests.support.serving import serving

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def artifact(tmp_path_factory):
    """A small model with a chat template and room for 512 tokens."""
    shape = {"num_hidden_layers": 4, "max_position_embeddings": 512}
    return speaking_artifact(tmp_path_factory.mktemp("served"), context_length=512, template=TEMPLATE, **shape)


@pytest.fixture(scope="session")
def server(artifact):
    """A server with everything in DRAM, so that sums are in one order and texts equal whatever shares a pass."""
    with serving(artifact.path, "--dram", "1GB") as server:
        yield server


@pytest.fixture(scope="session")
def model(artifact):
    """The same artifact behind the Python interface."""
    with coldpress.load(artifact.path, dram="1GB") as model:
        yield model
