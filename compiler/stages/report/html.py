"""Makes pages of templates: what they write is escaped, and their parts are shared by the report and the comparison."""

from pathlib import Path
from typing import Any

import jinja2

from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.errors import printable

FOLDER = Path(__file__).parent


def environment(*folders: Path) -> jinja2.Environment:
    """Returns where templates are found: in `folders`, and among the report's own."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, FOLDER]),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["size"] = show_bytes
    return found


def shown(value: Any) -> Any:
    """Escapes control characters and marks of writing direction in a template's text, which a stranger may have chosen;
    line feeds stay, since a sample has them."""
    return "\n".join(map(printable, value.split("\n"))) if type(value) is str else value
