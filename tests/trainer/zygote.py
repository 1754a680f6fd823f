"""A warm process that forks ranks on request: `python zygote.py`. Starting each rank anew would cost four seconds.

A request is a line of JSON on standard input, the answer a line on standard output.
"""

import ctypes
import json
import os
import signal
import socket
import sys

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

from everstep.core.segment import AttemptSpec
from everstep.store import faults
from everstep.trainer import rank, shards, warm


def main():
    warm.up()
    for line in sys.stdin:
        request = json.loads(line)
        answer = start(request) if "specs" in request else reap(request["reap"])
        print(json.dumps(answer), flush=True)


def start(request):
    specs = request["specs"]
    listener = socket.create_server(("127.0.0.1", 0)) if len(specs) > 1 else None
    port = listener.getsockname()[1] if listener else 0
    pids = []
    for number, (spec, log) in enumerate(zip(specs, request["logs"], strict=True)):
        spec |= {"master_port": port, "listen_fd": listener.fileno() if listener and number == 0 else None}
        pid = os.fork()
        if pid == 0:
            if request["largest"]:
                shards.split.__defaults__ = (request["largest"],)
            be_rank(spec, log, request["faults"], None if number == 0 else listener)
        pids.append(pid)
    if listener:
        listener.close()
    return pids


def be_rank(spec, log, plan, close):
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
    os.setsid()
    if close:
        close.close()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    faults._PLAN = plan
    rank.live(AttemptSpec.model_validate(spec))


def reap(pid):
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


if __name__ == "__main__":
    main()
    os._exit(0)  # to take down all that PyTorch has imported costs seconds on a busy machine
