"""A user's own rows for the catalogues of log lines, from a YAML file."""

from pathlib import Path

import yaml
from pydantic import ValidationError

from everstep.core.health import Action, Severity
from everstep.core.log_rules import LogPolicy

LARGEST = 1 << 20  # bytes; a policy is written by hand


def load_policy(path: Path) -> LogPolicy:
    """The policy in a YAML file with the groups `xid`, `sxid` and `kinds`.

    Raises ValueError with one plain sentence for what a person wrote wrong.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path}: the file is larger than 1 MB; give a YAML file with xid, sxid and kinds.")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such policy file; give the path of a YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the policy file cannot be read ({error}); give the path of a YAML file.") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}: the policy file is not valid YAML{line}; docs/logs.md shows an example.") from None
    if content is None:
        return LogPolicy()
    if not isinstance(content, dict):
        raise ValueError(f"{path}: the policy file holds no groups; write xid, sxid or kinds at its top.")
    try:
        return LogPolicy.model_validate(content)
    except ValidationError as error:
        raise ValueError(_sentence(error, path)) from None


def _sentence(error: ValidationError, path: Path) -> str:
    """The first thing that is wrong: field, value, remedy."""
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    location = [str(part) for part in first["loc"] if part != "[key]"]
    field, shown = ".".join(location), repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if first["type"] == "extra_forbidden":
        known = "xid, sxid and kinds" if len(location) == 1 else "severity, action, component, why and ignore"
        return f"{path}: {field} is not known here; there are {known}."
    if first["type"] == "value_error":
        return f"{path}: {first['msg'].removeprefix('Value error, ')}"
    remedy = {
        "action": f"give one of {', '.join(Action)}.",
        "severity": f"give one of {', '.join(Severity)}.",
        "component": "give a lower-case name such as gpu/memory.",
        "why": "give a sentence of at most 400 characters.",
        "ignore": "give true or false.",
    }.get(location[-1], "give the number of a code and, under it, what to change.")
    return f"{path}: {field}: {shown} does not do; {remedy}"
