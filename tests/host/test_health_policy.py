"""A user's thresholds from a file: what they change, and how what is wrong is answered."""

import pytest
import yaml

from everstep.core.gpu import Driver, GpuSample, Sweep, XidEvent
from everstep.core.health import Action, State
from everstep.core.health_policy import DEFAULT
from everstep.core.judgement import Evidence, judge
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
    assert policy.of("NVIDIA H100 80GB HBM3").alarm_c == DEFAULT.alarm_c
    assert load_policy(write(tmp_path, "")) == DEFAULT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alarm: 80", "alarm is not known here; did you mean alarm_c?"),
        ("alarm_c: hot", "alarm_c: 'hot' does not do; "),
        ("alarm_c: -1", "alarm_c: -1 does not do; input should be greater than or equal to 0."),
        ("alarm_c: .nan", "alarm_c: nan does not do; "),
        ("models: [{pattern: '('}]", "'(' is no regular expression"),
        ("models: [{alarm_c: 80}]", "models.0.pattern is missing"),
        ("models: [{pattern: H100, alarm: 80}]", "models.0.alarm is not known here; did you mean alarm_c?"),
        ("xids: {63: {acton: reset_gpu}}", "xids.63.acton is not known here; did you mean action?"),
        ("xids: {63: {action: reset}}", "xids.63.action: 'reset' does not do; "),
        ("required: [temperature]", "temperature is no reading; there are "),
        ("[1]", "holds no groups; write thresholds or models"),
        ("a: [", "is not valid YAML at line 1; docs/health.md"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path, text, said):
    with pytest.raises(ValueError, match=r"policy\.yaml: ") as refused:
        load_policy(write(tmp_path, text))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_decides_what_is_judged(tmp_path):
    """BC-146, BC-141: the table of Xids can be overridden, and readings can be asked for."""
    policy = load_policy(write(tmp_path, "xids: {63: {action: reboot_node}}\nrequired: [temperature_c]\n"))
    sample = GpuSample(time=0.0, uuid="GPU-1")
    sweep = Sweep(time=0.0, seconds=0.1, driver=Driver.present, gpus=(sample,))
    event = XidEvent(time=0.0, last=0.0, uuid="GPU-1", xid=63)
    assert judge(Evidence(now=0.0, node="n", sweeps=(sweep,)), policy).verdict.state is State.unknown
    found = judge(Evidence(now=0.0, node="n", sweeps=(sweep,), xids=(event,)), policy).verdict
    assert (found.state, found.action) == (State.failed, Action.reboot_node)
