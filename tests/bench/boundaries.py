"""What a healthy segment boundary costs, and what the trainer's loop costs a step."""

from statistics import median

from flow import Flow, Lab, Stamp

AFTER = 10


def measure(lab: Lab, name: str, segments: int, steps: int, config: dict) -> dict[str, float]:
    """Boundaries between `segments` of `steps` steps.

    A gap is the time from the end of a step to the begin of the next. At a boundary it is compared with the median of
    all other gaps: the rest is time in which no step runs. The steps right after it are compared in the same way: they
    run while the checkpoint is written.
    """
    job = {"steps": segments * steps, "segment_steps": steps}
    with Flow(lab, name, config, job) as flow:
        flow.await_completion(240)
        stamps = {one.step: one for one in flow.stamps()}
        waits = sum(row["phase"] == "wait" for row in flow.rows("phases.jsonl"))
    ends = range(steps, (segments - 1) * steps + 1, steps)
    gaps = {step: stamps[step + 1].began - stamps[step].ended for step in stamps if step + 1 in stamps}
    ordinary = median(gap for step, gap in gaps.items() if step not in ends)
    extra = sorted(gaps[step] - ordinary for step in ends)
    return {
        "boundary_ms": 1000 * median(extra),
        "boundary_p95_ms": 1000 * extra[int(0.95 * len(extra))],
        "gap_us": 1e6 * ordinary,
        "step_ms": 1000 * median(_length(one) for one in stamps.values()),
        "slowdown_ms": 1000 * _slowdown(stamps, ends, steps),
        "waits": waits,
    }


def _slowdown(stamps: dict[int, Stamp], ends: range, steps: int) -> float:
    """By how much the steps after a boundary are longer than those in the second half of a segment, all together."""
    usual = median(_length(one) for step, one in stamps.items() if step % steps > steps // 2)
    return median(sum(_length(stamps[end + k]) - usual for k in range(1, AFTER + 1)) for end in ends)


def _length(stamp: Stamp) -> float:
    return stamp.ended - stamp.began


def overhead(lab: Lab, blocks: int) -> dict[str, float]:
    """Microseconds that the trainer's loop adds to an empty step of one rank: paired with a bare loop in one process."""
    job = {"steps": 200 * blocks, "segment_steps": 200 * blocks}
    with Flow(lab, "empty", {}, job, build="build_empty") as flow:
        flow.await_completion(240)
        pairs = [(float(ours), float(bare)) for ours, bare in flow.lines()]
    return {
        "overhead_us": median(ours - bare for ours, bare in pairs),
        "bare_us": median(bare for _, bare in pairs),
    }
