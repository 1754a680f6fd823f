"""The sentences at the head of a run's report."""

from collections.abc import Iterable

from everstep.core import words
from everstep.core.summary import RunReport


def headline(report: RunReport) -> Iterable[str]:
    """What happened, for one who reads nothing else."""
    yield _outcome(report)
    if report.metrics or report.last_loss is not None:
        figures = [f"{name} {words.figure(value)}" for name, value in list(report.metrics.items())[:4]]
        loss = [] if report.last_loss is None else [f"loss {words.figure(report.last_loss)}"]
        yield f"How good it is: {', '.join(figures + loss)}."
    if report.time.wall:
        yield _time_and_cost(report)
    if trouble := _trouble(report):
        yield trouble


def _outcome(report: RunReport) -> str:
    of = f" of {report.steps:,}" if report.steps else ""
    last = report.attempts[-1] if report.attempts else None
    why = words.first_line(last.cause, 200).rstrip(".") if last and last.cause else ""
    match report.status:
        case "completed":
            early = " It ended early, as its program wished." if report.steps and report.step < report.steps else ""
            return f"Completed: step {report.step:,}{of}.{early}"
        case "stopped":
            return f"Stopped on request at step {report.step:,}{of}; it can go on from there."
        case "failed":
            return f"Failed at step {report.step:,}{of}{': ' + why if why else ''}."
        case "killed":
            saved = report.checkpoint_counts.get("saved")
            on = "it can go on from its last checkpoint" if saved else "nothing was saved, so it begins anew"
            seen = f"; the last sign of life was {words.moment(report.last_sign)}" if report.last_sign else ""
            return f"Killed: its flow vanished at step {report.step:,}{of}{seen}; {on}."
    return f"{report.status.capitalize()}: step {report.step:,}{of}."


def _time_and_cost(report: RunReport) -> str:
    unit = "GPU-hours" if report.cost.gpus else "rank-hours"
    price = "" if report.cost.total is None else f", which cost {words.money(report.cost.total, report.cost.currency)}"
    return (
        f"It took {words.duration(report.time.wall)} and {words.hours(report.cost.hours)} {unit}{price}; "
        f"{words.share(report.time.ettr, 1.0)} of the time trained the model."
    )


def _trouble(report: RunReport) -> str:
    parts = []
    if report.restarts:
        seconds = sum(one.cost_seconds for one in report.attempts)
        paid = "" if report.cost.restarts is None else f" ({words.money(report.cost.restarts, report.cost.currency)})"
        parts.append(f"{words.count(report.restarts, 'restart')} cost {words.duration(seconds)}{paid}")
    bad = report.checkpoint_counts.get("quarantined", 0)
    if bad:
        parts.append(
            f"{words.count(bad, 'checkpoint')} did not prove right and {'is' if bad == 1 else 'are'} set aside"
        )
    closed = sum(1 for one in report.gates if one.passed is False)
    if closed:
        parts.append(f"{words.count(closed, 'gate')} closed")
    if report.loss.odd_rows:
        parts.append(f"the loss was not a number in {words.count(report.loss.odd_rows, 'step')}")
    if not parts:
        return "Nothing went wrong." if report.status == "completed" else ""
    return f"What went wrong: {'; '.join(parts)}."
