"""How Prefect treats the pieces of a training run. The training task is called directly, never submitted: only the
main thread hears a cancel. Nothing is cached: every piece asks its own durable facts.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from everstep.host import between, life

begin_attempt = task(name="begin-attempt", cache_policy=NO_CACHE)(life.begin_attempt)
train_segment = task(name="train-segment", cache_policy=NO_CACHE)(life.train_segment)
verify = task(name="verify-checkpoint", cache_policy=NO_CACHE)(between.verify)
keep = task(name="keep-checkpoints", cache_policy=NO_CACHE)(between.keep)
decide = task(name="decide", cache_policy=NO_CACHE)(life.decide)
finish = task(name="finish", cache_policy=NO_CACHE)(life.finish)
