"""Records from YAML files that people write, such as profiles: unknown or repeated keys and wrong types are refused."""

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError

R = TypeVar("R", bound=Record)


def load_yaml(path: Path, kind: type[R]) -> R:
    """A record from a YAML file that names no key twice.

    Raises:
        ColdpressError: if there is no such file or it is not such a record.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
        return kind.model_validate_json(json.dumps(data))
    except FileNotFoundError as error:
        raise ColdpressError(f"{path}: no such profile") from error
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise ColdpressError(f"{path}: not a YAML profile: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ColdpressError(f"{path}: {place or 'profile'}: {first['msg']}, found {first['input']!r}") from error


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; a profile must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
