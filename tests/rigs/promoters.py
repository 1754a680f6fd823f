"""Processes that promote, forked from one that has imported MLflow already: starting dozens takes seconds, not minutes.

Each line on standard input is a list of orders that are carried out at the same time, one process each; the answer is
a line with the list of what each gave, or its exit status where a fault ended it.
"""

import json
import os
import sys
import traceback


def promote(uri, name, run_id, number, step, metric, hold=None):
    """Release a version, as a run does whose best checkpoint is to be judged by the metric `loss`."""
    from everstep.core import promotion
    from everstep.core.job import Best
    from everstep.core.promotion import Candidate, Wish
    from everstep.host import mlflow_run, registry

    client = mlflow_run.connect(uri)
    one = Candidate(
        job=name, run=run_id, checkpoint=f"step-{step:08d}.a1", step=step, uri=f"file:///{run_id}/{step}",
        digest=f"digest-{run_id}-{step}", metrics={"loss": metric},
    )  # fmt: skip
    wish = Wish(candidate=one, release=True, best=Best(metric="loss"))
    tags = promotion.tags(one, wish.best)
    number = registry.register(client, name, run_id, f"s3://bucket/{run_id}/{step}", tags)
    registry.point_candidate(client, name, number)
    done = registry.release(
        client, name, number, lambda production: promotion.refusal(wish, production), f"{name}-{run_id}", 60
    )
    return {"version": number, "refusal": done.refusal, "production": done.production}


def rollback(uri, name):
    from everstep.host import registry

    return registry.rollback(name, uri).now


def carried_out(order, write):
    from everstep.store import faults

    faults._PLAN = order.pop("plan", None)
    try:
        answer = {"promote": promote, "rollback": rollback}[order.pop("do")](**order)
    except Exception as error:  # noqa: BLE001 - it is the answer
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(write, json.dumps(answer).encode())


def main():
    import mlflow.tracking  # noqa: F401
    from mlflow.store.model_registry import sqlalchemy_store  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        running = []
        for order in json.loads(line):
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(read)
                carried_out(order, write)
                os._exit(0)
            os.close(write)
            running.append((pid, read))
        answers = []
        for pid, read in running:
            with os.fdopen(read, "rb") as pipe:
                text = pipe.read()
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            answers.append(json.loads(text) if text else status)
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
