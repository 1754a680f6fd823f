"""A user's own thresholds of the health judgement, from a YAML file."""

from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from everstep.core.health_policy import HealthPolicy, ModelLimits
from everstep.core.log_rules import Override
from everstep.core.record import Record
from everstep.host import policy_file

_GROUPS: dict[str, type[Record]] = {"models": ModelLimits, "xids": Override}


def load_policy(path: Path) -> HealthPolicy:
    """The policy in a YAML file: thresholds by their names, `models`, `required`, `xids`. What it leaves out stays.

    Raises ValueError with one plain sentence for what a person wrote wrong.
    """
    content = policy_file.read(path, "thresholds and models", "docs/health.md")
    try:
        return HealthPolicy.model_validate(content)
    except ValidationError as error:
        raise ValueError(_sentence(error, path)) from None


def _sentence(error: ValidationError, path: Path) -> str:
    """The first thing that is wrong: field, value, remedy."""
    first = error.errors(include_url=False)[0]
    location, shown = ".".join(str(part) for part in first["loc"]), repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if first["type"] == "extra_forbidden":
        group = _GROUPS.get(str(first["loc"][0]), HealthPolicy) if len(first["loc"]) > 1 else HealthPolicy
        fields = group.model_fields
        near = get_close_matches(str(first["loc"][-1]), list(fields), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}."
        return f"{path}: {location} is not known here; {hint}"
    if first["type"] == "value_error":
        return f"{path}: {location}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] == "missing":
        return f"{path}: {location} is missing; give a part of the model's name."
    return f"{path}: {location}: {shown} does not do; {first['msg'][0].lower()}{first['msg'][1:]}."
