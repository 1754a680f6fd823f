"""What an object store's refusals mean: mend it, look again, or it is as the store says. Pure; no text of a store is
repeated, because a store's error can hold parts of a signed request.
"""

import re
from dataclasses import dataclass

from everstep.core.errors import EverstepError
from everstep.store.objects import Changed, NotThere

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_UNKNOWN_KEY = frozenset({"InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId", "NotSignedUp"})
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "TemporaryRedirect"}
)
_PASSING = frozenset(
    [
        "SlowDown",
        "ServiceUnavailable",
        "InternalError",
        "RequestTimeout",
        "RequestTimeoutException",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "TooManyRequests",
        "ConditionalRequestConflict",
        "OperationAborted",
        "IncompleteBody",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "429",
        "409",
    ]
)
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")


class Passing(EverstepError):
    """It may go better the next time. The text says what happened, for the case that it never does."""


class Expired(EverstepError):
    """The keys have run out."""


@dataclass(frozen=True)
class Asked:
    """What was asked of the store: the words of a sentence. `verb` is list, read, write or delete."""

    verb: str
    bucket: str
    key: str
    endpoint: str | None

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}" if self.key else f"s3://{self.bucket}"

    @property
    def store(self) -> str:
        return self.endpoint or "AWS S3"


def code_in(text: str) -> tuple[str, int]:
    """The error code and HTTP status in a message of obstore; empty and 0 where the store did not answer."""
    code, status = _CODE.search(text), _STATUS.search(text)
    return code.group(1) if code else "", int(status.group(1)) if status else 0


def judge(asked: Asked, code: str, status: int) -> Exception:
    """The exception for an answer of the store; see `everstep.store.objects` for which is which."""
    if code in EXPIRED:
        return Expired(f"s3: the credentials for {asked.store} have run out; renew them and start again.")
    if code in _PASSING or status >= 500 or status == 429:
        return Passing(f"{asked.store} answers {code or status}")
    return _refusal(asked, code, status)


def _refusal(asked: Asked, code: str, status: int) -> Exception:
    if code == "NoSuchBucket":
        return ValueError(
            f"s3://{asked.bucket}: there is no such bucket at {asked.store}; create it or correct the name."
        )
    if code in ("NoSuchKey", "NoSuchUpload", "404") or status == 404:
        return NotThere(f"{asked.uri} is not there.")
    if code == "PreconditionFailed" or status in (412, 416):
        return Changed(f"{asked.uri} is not the object any more that it was.")
    if code in _UNKNOWN_KEY:
        return ValueError(f"s3: {asked.store} does not know the access key; check AWS_ACCESS_KEY_ID or the profile.")
    if code == "SignatureDoesNotMatch":
        return ValueError(
            f"s3: the secret key does not belong to the access key, says {asked.store}; check AWS_SECRET_ACCESS_KEY "
            "or the profile."
        )
    if code == "RequestTimeTooSkewed":
        return ValueError(f"s3: this machine's clock differs too much from that of {asked.store}; set the clock right.")
    if code in _ELSEWHERE or status in (301, 307):
        return ValueError(f"s3://{asked.bucket} is in another region; set s3.region or AWS_REGION to it.")
    if code in ("AccessDenied", "AllAccessDisabled") or status in (401, 403):
        return ValueError(
            f"{asked.uri}: {asked.store} gives these credentials no right to {asked.verb} it; ask its owner for the "
            "right or use other credentials."
        )
    return ValueError(
        f"{asked.uri}: {asked.store} refuses to {asked.verb} it ({code or status}); check the s3 settings."
    )
