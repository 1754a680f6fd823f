"""Flow runs as a Prefect server tells of them."""

import time


def await_state(client, flow_run, names: set[str], seconds: float = 120) -> str:
    """Wait until a flow run's state has one of these names; which."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = client.read_flow_run(flow_run).state
        if state and state.name in names:
            return state.name
        time.sleep(0.2)
    raise AssertionError(f"flow run is {client.read_flow_run(flow_run).state!r}, not one of {names}")
