"""Reading a policy that a person has written in YAML."""

from pathlib import Path
from typing import Any

import yaml

LARGEST = 1 << 20  # bytes; a policy is written by hand


def read(path: Path, holds: str, page: str) -> dict[str, Any]:
    """The file's groups; none for an empty one. `holds` says what may stand at its top, `page` where an example is.

    Raises ValueError with one plain sentence.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path}: the file is larger than 1 MB; give a YAML file with {holds}.")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such policy file; give the path of a YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the policy file cannot be read ({error}); give the path of a YAML file.") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}: the policy file is not valid YAML{line}; {page} shows an example.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: the policy file holds no groups; write {holds.replace(' and ', ' or ')} at its top.")
    return content
