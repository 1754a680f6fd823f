"""The thresholds: each with its source, each documented, and whose goes before whose."""

from pathlib import Path

from everstep.core.health_policy import DEFAULT, HealthPolicy, Limits, ModelLimits, shipped

PAGE = Path(__file__).parents[2] / "docs" / "health.md"


def test_every_threshold_is_shipped_with_its_source_and_no_other_is():
    assert {row.name for row in shipped() if not row.model} == set(Limits.model_fields)
    assert all(row.source for row in shipped())
    assert set(ModelLimits.model_fields) - {"pattern", "source"} <= set(Limits.model_fields)
    assert set(DEFAULT.of("").model_dump()) == set(Limits.model_fields)


def test_the_page_lists_the_thresholds():
    rows = [f"| `{row.name}` | {row.value:g} {row.unit} | {row.source} |" for row in shipped() if not row.model]
    page = PAGE.read_text(encoding="utf-8")
    assert [row for row in rows if row not in page] == []


def test_whose_value_counts():
    sxm, pcie = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"
    assert (DEFAULT.of(sxm).nvlinks, DEFAULT.of(pcie).nvlinks, DEFAULT.of().nvlinks) == (18, 0, 0)
    assert [DEFAULT.of(name).nvlinks for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA H200 NVL")] == [
        12,
        18,
        0,
    ]
    own = HealthPolicy(
        nvlinks=4, models=(ModelLimits(pattern="hbm3", nvlinks=6), ModelLimits(pattern="H100", nvlinks=2))
    )
    assert (own.of(sxm).nvlinks, own.of(pcie).nvlinks, own.of("NVIDIA H200").nvlinks) == (6, 2, 4)
    assert own.of(sxm).alarm_c == DEFAULT.alarm_c
    assert HealthPolicy() == DEFAULT
