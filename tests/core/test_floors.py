"""Floors by model, and the judgement of an active test."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.check import Outcome, overall
from everstep.core.exam import SPEEDS, Examination, Measured, Part, judge
from everstep.core.floors import Floors, ModelFloors, Speed, shipped

H100 = "NVIDIA H100 80GB HBM3"
GOOD = {
    Speed.bf16: 650.0, Speed.fp16: 650.0, Speed.fp32: 50.0, Speed.memory: 2600.0, Speed.h2d: 55.0, Speed.d2h: 54.0,
    Speed.all_reduce: 350.0,
}  # fmt: skip


def exam(rank=0, model=H100, speeds=None, device=None, **more):
    speeds = GOOD | (speeds or {})
    measured = tuple(
        Measured(part=part, speeds={one: speeds[one] for one in SPEEDS[part]}, compared=1000) for part in Part
    )
    return Examination(**{"rank": rank, "device": device or f"GPU-{rank}", "model": model, "measured": measured} | more)


def node(size=8, **of_rank_3):
    return [exam(rank, **(of_rank_3 if rank == 3 else {})) for rank in range(size)]


def named(checks, name):
    return next(one for one in checks if one.name == name)


@pytest.mark.parametrize("row", shipped(), ids=lambda row: f"{row.model} {row.speed}")
def test_every_row_can_be_reached_and_has_its_source(row):
    models = [
        H100, "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA B200", "NVIDIA GB200", "NVIDIA B300 SXM6 AC",
        "Tesla V100-SXM2-32GB",
    ]  # fmt: skip
    assert any(Floors().of(model, row.ranks or 1).get(row.speed) == row.value for model in models)
    assert row.source
    assert row.unit == row.speed.unit


def test_the_page_lists_the_floors():
    page = (Path(__file__).parents[2] / "docs" / "health.md").read_text(encoding="utf-8")
    rows = [
        f"| `{row.speed.value}` | {row.value:g} {row.unit} | {row.ranks or ''} | {row.source} |" for row in shipped()
    ]
    assert [row for row in rows if row not in page] == []


def test_a_model_has_its_own_floors_and_a_part_of_it_none():
    assert Floors().of(H100)[Speed.memory] == 1905
    assert Floors().of("NVIDIA H200")[Speed.h2d] == 48
    assert Speed.h2d not in Floors().of("NVIDIA H100 PCIe"), "hosts of both generations of PCIe carry it"
    assert Floors().of("NVIDIA A100-SXM4-80GB")[Speed.d2h] == 21
    assert Speed.all_reduce not in Floors().of(H100, 4)
    assert Floors().of(f"{H100} MIG 1g.10gb") == {}
    assert Floors().of("NVIDIA GeForce GTX 1080") == Floors().of("") == {}


def test_a_users_rows_go_before_ours_and_zero_is_no_floor():
    rows = (
        ModelFloors(pattern="h100", h2d_gb_per_second=20, memory_gb_per_second=0),
        ModelFloors(pattern="1080", fp32_tflops=7),
    )
    floors = Floors(models=rows)
    assert floors.of(H100)[Speed.h2d] == 20
    assert Speed.memory not in floors.of(H100)
    assert floors.of(H100)[Speed.bf16] == 490
    assert floors.of("NVIDIA GeForce GTX 1080") == {Speed.fp32: 7}
    with pytest.raises(ValueError, match="no regular expression"):
        ModelFloors(pattern="H100 (")


def test_a_healthy_node_passes_with_figures_and_rules():
    checks = judge(node())
    assert {one.outcome for one in checks} == {Outcome.passed}
    speed = named(checks, "memory speed, GPU-3")
    assert speed.figures == {"rank": 3, "uuid": "GPU-3", "model": H100, "memory_gb_per_second": 2600.0}
    assert speed.rule == "memory_gb_per_second at least 1905; at least 0.7 of the median of its peers"
    assert named(checks, "all reduce speed, 8 ranks").rule == "all_reduce_gb_per_second at least 230"


@pytest.mark.parametrize(("speed", "part"), [(one, part) for part, all_of in SPEEDS.items() for one in all_of][:-1])
def test_a_gpu_far_below_its_floor_or_its_peers_fails_and_is_named(speed, part):
    checks = judge(node(speeds={speed: GOOD[speed] * 0.5}))
    failed = [one for one in checks if one.outcome is Outcome.failed]
    assert [one.name for one in failed] == [f"{part.words} speed, GPU-3"]
    assert failed[0].figures["uuid"] == "GPU-3"
    assert speed.value in failed[0].why
    assert "wrong" not in failed[0].figures


def test_a_slow_all_reduce_is_laid_to_no_gpu():
    checks = judge([exam(rank, speeds={Speed.all_reduce: 200.0}) for rank in range(8)])
    failed = [one for one in checks if one.outcome is Outcome.failed]
    assert [one.name for one in failed] == ["all reduce speed, 8 ranks"]
    assert "uuid" not in failed[0].figures
    assert overall(judge([exam(rank, speeds={Speed.all_reduce: 200.0}) for rank in range(4)])) is Outcome.passed


def test_wrong_values_fail_whatever_the_model():
    wrong = Measured(part=Part.matmul, speeds={Speed.bf16: 900.0}, compared=4096, wrong=2, greatest_error=64.0)
    one = Examination(rank=3, device="GPU-3", model="Some New GPU", measured=(wrong,))
    check = named(judge([one]), "matmul values, GPU-3")
    assert check.outcome is Outcome.failed
    assert check.why == "2 of 4096 elements are wrong, the greatest error is 64"
    assert (check.figures["wrong"], check.figures["greatest_error"], check.figures["uuid"]) == (2, 64.0, "GPU-3")
    infinite = wrong.model_copy(update={"greatest_error": None})
    check = named(judge([one.model_copy(update={"measured": (infinite,)})]), "matmul values, GPU-3")
    assert "no number" in check.why


def test_without_a_floor_figures_are_given_and_values_still_judged():
    checks = judge([exam(rank, model="Some New GPU") for rank in range(2)])
    assert named(checks, "memory values, GPU-1").outcome is Outcome.passed
    speed = named(checks, "memory speed, GPU-1")
    assert speed.outcome is Outcome.not_measured
    assert speed.figures["memory_gb_per_second"] == 2600.0
    assert "no floor for this model (Some New GPU)" in speed.why


def test_peers_are_compared_without_a_floor_but_only_gpus_of_one_model_and_three_of_them():
    def slow(size, **more):
        return overall(judge(node(size, **{"speeds": {Speed.memory: 1700.0}} | more), Floors()))

    new = {"model": "Some New GPU"}
    ranks = [exam(rank, **new, speeds={Speed.memory: 1700.0} if rank == 3 else {}) for rank in range(8)]
    assert [one.name for one in judge(ranks) if one.outcome is Outcome.failed] == ["memory speed, GPU-3"]
    assert overall(judge(ranks, Floors(peer_fraction=0))) is Outcome.passed
    assert overall(judge(ranks[2:4])) is Outcome.passed, "one peer proves nothing"
    assert slow(8, model="Another New GPU") is Outcome.passed
    cpus = [one.model_copy(update={"device": "cpu"}) for one in ranks]
    assert overall(judge(cpus)) is Outcome.passed


def test_an_error_of_the_device_fails_and_silence_is_not_measured():
    error = Measured(part=Part.memory, error="CUDA error: an illegal memory access was encountered")
    one = Examination(rank=0, device="GPU-0", model=H100, measured=(error,), why="the device failed before")
    checks = judge([one])
    assert [check.name for check in checks if check.outcome is Outcome.failed] == ["memory values, GPU-0"]
    assert named(checks, "memory values, GPU-0").why == "CUDA error: an illegal memory access was encountered"
    silent = Examination(rank=0, device="GPU-0", why="no answer within 20 s")
    checks = judge([silent])
    assert overall(checks) is Outcome.not_measured
    assert {check.why for check in checks} == {"no answer within 20 s"}
    assert judge([]) == ()


SPEED = st.floats(0.0, 5000.0)
RANKS = st.lists(
    st.builds(
        lambda speeds, model, device: (speeds, model, device),
        st.fixed_dictionaries(dict.fromkeys(Speed, SPEED)),
        st.sampled_from([H100, "NVIDIA A100-SXM4-80GB", "Some New GPU"]),
        st.sampled_from(["cpu", ""]),
    ),
    min_size=1,
    max_size=8,
)


def exams(ranks):
    return [exam(rank, model, speeds, device) for rank, (speeds, model, device) in enumerate(ranks)]


@given(RANKS, st.data())
def test_a_slower_measurement_never_turns_a_fail_into_a_pass(ranks, data):
    rank = data.draw(st.integers(0, len(ranks) - 1))
    speed = data.draw(st.sampled_from(list(Speed)))
    speeds, model, device = ranks[rank]
    slower = list(ranks)
    slower[rank] = ({**speeds, speed: speeds[speed] * data.draw(st.floats(0.0, 1.0))}, model, device)
    name = exams(ranks)[rank].name
    after = {one.name: one.outcome for one in judge(exams(slower))}
    for one in judge(exams(ranks)):
        if one.outcome is Outcome.failed and (one.name.endswith(name) or one.name.startswith("all reduce speed")):
            assert after[one.name] is Outcome.failed


@given(RANKS, st.randoms())
def test_the_order_of_ranks_does_not_matter(ranks, dice):
    shuffled = exams(ranks)
    dice.shuffle(shuffled)
    assert judge(shuffled) == judge(exams(ranks))
