"""A user's thresholds from a file: what they change, and how what is wrong is answered."""

import pytest
import yaml

from everstep.core.health_policy import DEFAULT
from everstep.host.health_policy import load_policy


def write(tmp_path, text):
    (tmp_path / "policy.yaml").write_text(text)
    return tmp_path / "policy.yaml"


def test_what_a_file_names_is_changed_and_the_rest_stays(tmp_path):
    rows = [{"pattern": "H100 PCIe", "alarm_c": 83}]
    policy = load_policy(write(tmp_path, yaml.safe_dump({"low_seconds": 900, "models": rows})))
    assert policy.low_seconds == 900
    assert policy.idle_seconds == DEFAULT.idle_seconds
    assert policy.of("NVIDIA H100 PCIe").alarm_c == 83
    assert policy.of("NVIDIA H100 80GB HBM3") == DEFAULT.of("NVIDIA H100 80GB HBM3")
    assert load_policy(write(tmp_path, "")) == DEFAULT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alarm: 80", "alarm is not known here; did you mean alarm_c?"),
        ("alarm_c: hot", "alarm_c: 'hot' does not do; "),
        ("alarm_c: -1", "alarm_c is -1"),
        ("alarm_c: .nan", "alarm_c is nan"),
        ("models: [{pattern: '('}]", "'(' is no regular expression"),
        ("models: [{alarm_c: 80}]", "models.0.pattern is missing"),
        ("[1]", "holds no groups; write thresholds or models"),
        ("a: [", "is not valid YAML at line 1; docs/health.md"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path, text, said):
    with pytest.raises(ValueError, match=r"policy\.yaml: ") as refused:
        load_policy(write(tmp_path, text))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
