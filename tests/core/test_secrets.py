"""What is written down of a job holds no secret."""

import pytest

from everstep.core.secrets import without_secrets


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("postgresql://me:pass@host/db", "postgresql://***@host/db"),
        ("http://host:5000", "http://host:5000"),
        ("https://host/x?token=abc&y=1&X-Amz-Signature=ff", "https://host/x?token=***&y=1&X-Amz-Signature=***"),
        ({"hf_token": "abc", "tokens": 5, "api_key": "k", "empty_password": ""},
         {"hf_token": "***", "tokens": 5, "api_key": "***", "empty_password": ""}),
        ({"a": [{"aws_secret_access_key": "k"}, "s3://bucket/prefix"]}, {"a": [{"aws_secret_access_key": "***"}, "s3://bucket/prefix"]}),
        (None, None),
        (0.5, 0.5),
    ],
)  # fmt: skip
def test_secrets_are_hidden_and_nothing_else(value, shown):
    assert without_secrets(value) == shown
