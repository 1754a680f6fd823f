"""A user's own floors of the active gate, from a YAML file."""

from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from everstep.core.floors import Floors, ModelFloors
from everstep.host import policy_file


def load_floors(path: Path) -> Floors:
    """The floors in a YAML file: `peer_fraction`, and `models` with rows. What it leaves out stays.

    Raises ValueError with one plain sentence for what a person wrote wrong.
    """
    content = policy_file.read(path, "peer_fraction and models", "docs/health.md")
    try:
        return Floors.model_validate(content)
    except ValidationError as error:
        raise ValueError(_sentence(error, path)) from None


def _sentence(error: ValidationError, path: Path) -> str:
    """The first thing that is wrong: field, value, remedy."""
    first = error.errors(include_url=False)[0]
    location, shown = ".".join(str(part) for part in first["loc"]), repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if first["type"] == "extra_forbidden":
        fields = (ModelFloors if len(first["loc"]) > 1 else Floors).model_fields
        near = get_close_matches(str(first["loc"][-1]), list(fields), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}."
        return f"{path}: {location} is not known here; {hint}"
    if first["type"] == "value_error":
        return f"{path}: {location}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] == "missing":
        return f"{path}: {location} is missing; give a part of the model's name."
    return f"{path}: {location}: {shown} does not do; {first['msg'][0].lower()}{first['msg'][1:]}."
