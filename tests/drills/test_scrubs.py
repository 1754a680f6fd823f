"""A scrub beside a living training: rot is mended, and the training does not notice."""

import subprocess
import sys

from drill import ROOT
from plans import Shape

from everstep.core.checkpoint import Key
from everstep.store import checkpoint, marks
from everstep.store.layout import RunPlaces


def test_rot_in_a_checkpoint_of_the_living_attempt_is_mended_beside_it(make_drill, untouched):
    drill = make_drill(config={"pause": 0.5}, checkpoint={"every_steps": 5, "keep": 20})
    flow = drill.start()
    drill.await_step(14, flow)
    places = RunPlaces(drill.run_dir, drill.local_dir)
    bad = Key(5, 1)
    trained = []
    for tier in ("local", "persistent"):
        file = next(places.checkpoint(tier, bad).glob("*.safetensors"))
        good = file.read_bytes()
        file.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
        code = "import sys; from everstep.core.scrub import ScrubJob; from everstep.host import scrubbing as s; "
        code += "one = s.begin(ScrubJob(where=sys.argv[1], mb_per_second=1e5)); s.scrub_run(one, one.runs[0]); "
        code += "print(s.finish(one)['repaired'])"
        command = [sys.executable, "-c", code, str(drill.run_dir)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout == "1\n", done.stderr
        assert file.read_bytes() == good
        trained.append(flow.poll() is None)
    assert trained[0], "it trained on beside the scrub"
    ended = drill.wait(flow)
    assert ended.code == 0, ended.err
    assert (ended.final["restarts"], ended.final["quarantined"]) == (0, [])
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
    structure = checkpoint.read_structure(drill.run_dir)
    assert all(checkpoint.verify(places.checkpoint(tier, bad), structure).ok for tier in ("local", "persistent"))
    assert marks.read(places)
