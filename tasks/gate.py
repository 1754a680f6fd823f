"""How Prefect treats the data gate. It is never tried again: what it refuses, a person must mend."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from everstep.host import life

check_data = task(name="check-data", cache_policy=NO_CACHE)(life.check_data)
