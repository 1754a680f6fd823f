"""How Prefect treats promotion: a task of its own, so that a refused or failed one is seen as such.

It bounds itself by the job's `limits.drain`; a time limit of Prefect's would overrule the job. It has no tags: for each
tag Prefect's server is asked for a slot, and a run must end well without a server.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from everstep.host import promotion

promote = task(name="promote-checkpoint", retries=2, retry_delay_seconds=[2, 10], cache_policy=NO_CACHE)(
    promotion.promote
)
