"""A recorded trace gives back what was recorded, with the interface of the sampler."""

import pytest

from everstep.core.gpu import Answer, Driver, GpuSample, NvLink, Sweep, XidEvent
from everstep.sim.trace import Recorder, TraceEnded, TraceSampler


def sweep(at: float, *answers: Answer) -> Sweep:
    gpus = tuple(
        GpuSample(time=at, uuid=f"GPU-{i}", index=i, answer=answer, temperature_c=40 + at, links=(NvLink(number=0),))
        for i, answer in enumerate(answers)
    )
    return Sweep(time=at, seconds=0.01, driver=Driver.present, gpus=gpus)


def test_trace_is_read_as_it_was_recorded(tmp_path):
    path = tmp_path / "trace.jsonl"
    first, second = sweep(1, Answer.ok, Answer.ok), sweep(2, Answer.ok, Answer.lost)
    xid = XidEvent(time=1.5, last=1.5, uuid="GPU-1", xid=79)
    with Recorder(path) as recorder:
        recorder.sweep(first)
        recorder.events((xid,))
        recorder.sweep(second)
    sampler = TraceSampler(path)
    assert sampler.wait(0) == ()
    assert sampler.sweep() == first
    assert sampler.wait(60) == (xid,)
    assert sampler.wait(0) == ()
    assert sampler.sweep() == second
    assert sampler.last("GPU-1") == first.gpus[1]
    with pytest.raises(TraceEnded):
        sampler.sweep()
    sampler.close()


def test_line_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('\n{"swept": 1}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl: line 2 is no line of a trace \(swept"):
        TraceSampler(path)
