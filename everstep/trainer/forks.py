"""Keeps forks of this process, such as those of loader workers, away from what they must not inherit half made.

A fork copies every open descriptor. One that happens while another thread starts the writer takes the writer's end of a
socket, or the pipe on which `subprocess` waits for its exec, into a process that never closes it: whoever waits for the
end of that stream then waits for as long as the loader worker lives.
"""

import os
import threading

starting = threading.RLock()
"""Held while descriptors are open that no fork may copy; a fork of any thread waits for it. Never hold it for long."""

os.register_at_fork(before=starting.acquire, after_in_parent=starting.release, after_in_child=starting.release)
