"""A user's policy file: read as it is written, and a wrong row is one plain sentence."""

import pytest

from everstep.core.health import Action, Severity
from everstep.core.logs import classify_log
from everstep.host.log_policy import load_policy


@pytest.fixture
def policy(tmp_path):
    def write(text):
        path = tmp_path / "policy.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_rows_of_a_file_are_obeyed(policy):
    path = policy("xid:\n  63: {action: reboot_node, severity: critical}\nkinds:\n  nic_power: {ignore: true}\n")
    (found,) = classify_log("NVRM: Xid (PCI:0000:a1:00): 63, x", policy=load_policy(path))
    assert (found.action, found.severity) == (Action.reboot_node, Severity.critical)


def test_an_empty_file_changes_nothing(policy):
    assert load_policy(policy("# nothing yet\n")).xid == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("xid: {63: {action: reboot}}", "xid.63.action: 'reboot' does not do; give one of ignore_log, "),
        ("xid: {63: {severity: fatal}}", "xid.63.severity: 'fatal' does not do; give one of critical, high, medium, low."),
        ("xid: {off_bus: {action: reset_gpu}}", "xid.off_bus: 'off_bus' does not do; give the number of a code"),
        ("xid: {0: {action: reset_gpu}}", "xid: 0 is no such number; give one from 1 to 99999."),
        ("xid: {63: reset_gpu}", "xid.63: 'reset_gpu' does not do; give the number of a code and, under it, what to change."),
        ("kinds: {cuda_omm: {ignore: true}}", "kinds: there is no kind 'cuda_omm'; did you mean 'cuda_oom'?"),
        ("kinds: {zzzzzz: {ignore: true}}", "kinds: there is no kind 'zzzzzz'; docs/logs.md lists the kinds."),
        ("kinds: {cuda_oom: {colour: red}}", "kinds.cuda_oom.colour is not known here; there are severity, action, component, why and ignore."),
        ("codes: {63: {}}", "codes is not known here; there are xid, sxid and kinds."),
        ("kinds: {cuda_oom: {component: GPU}}", "kinds.cuda_oom.component: 'GPU' does not do; give a lower-case name such as gpu/memory."),
        ("- 63", "the policy file holds no groups; write xid, sxid or kinds at its top."),
        ("xid: {63: [", "the policy file is not valid YAML"),
        (b"\xff\xfe\x00", "the policy file cannot be read"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_one_plain_sentence(policy, text, sentence):
    path = policy(text)
    with pytest.raises(ValueError) as refused:
        load_policy(path)
    said = str(refused.value)
    assert said.startswith(f"{path}: {sentence}")
    assert "\n" not in said
    assert said.endswith((".", "?"))


def test_a_missing_file_is_one_plain_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"there is no such policy file; give the path of a YAML file\.$"):
        load_policy(tmp_path / "none.yaml")
