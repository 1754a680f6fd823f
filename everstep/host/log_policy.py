"""A user's own rows for the catalogues of log lines, from a YAML file."""

from pathlib import Path

from pydantic import ValidationError

from everstep.core.health import Action, Severity
from everstep.core.log_rules import LogPolicy
from everstep.host import policy_file


def load_policy(path: Path) -> LogPolicy:
    """The policy in a YAML file with the groups `xid`, `sxid` and `kinds`.

    Raises ValueError with one plain sentence for what a person wrote wrong.
    """
    content = policy_file.read(path, "xid, sxid and kinds", "docs/logs.md")
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
