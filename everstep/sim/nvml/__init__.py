"""A stand-in for the driver's `libnvidia-ml.so.1`, so that the real pynvml runs where there is no GPU."""

from everstep.sim.nvml.fake import FakeNvml as FakeNvml
