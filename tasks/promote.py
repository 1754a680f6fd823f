"""How Prefect treats promotion: a task of its own, so that a refused or failed one is seen and tagged as such.

It bounds itself by the job's `limits.drain`; a time limit of Prefect's would overrule the job.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from everstep.host import promotion

promote = task(
    name="promote-checkpoint", tags={"promotion"}, retries=2, retry_delay_seconds=[2, 10], cache_policy=NO_CACHE
)(promotion.promote)
