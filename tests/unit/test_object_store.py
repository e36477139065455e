"""What an object store answers: damage, or nothing about the snapshot. The texts are tensorstore 0.1.86's own."""

import re

import pytest

from mt_resilient.checkpoint.backend.object_store import Objects, sentence
from mt_resilient.checkpoint.durable.save_interval import SnapshotPolicy
from mt_resilient.resilience.errors import MachineError, SnapshotError, UsageError

DAMAGE = {
    'NOT_FOUND: chunk {0, 0} stored at shard entry {0, 0}/{16, 1} in "x/c/3/0" is missing': "is missing or incomplete",
    'NOT_FOUND: Error opening "zarr3" driver: Metadata at "s3://b/x/zarr.json" does not exist': "is missing",
    "DATA_LOSS: Error reading shard entry: Existing shard has size of 3 bytes, but expected at least 20": "is damaged",
    "DATA_LOSS: Digest mismatch, stored digest is 0x1 but computed digest is 0x2": "is damaged",
    "OUT_OF_RANGE: InvalidRange: The requested range cannot be satisfied. [http_response_code='416']": "is damaged",
    'FAILED_PRECONDITION: Error opening "zarr3" driver: Error reading "x/zarr.json": Invalid JSON': "is damaged",
}
NO_WORD = {
    "NOT_FOUND: NoSuchBucket: The specified bucket does not exist. [http_response_code='404']": "no such bucket",
    "PERMISSION_DENIED: SignatureDoesNotMatch: The signature … [http_response_code='403']": "SignatureDoesNotMatch",
    "INVALID_ARGUMENT: ExpiredToken: The provided token has expired. [http_response_code='400']": "refuses access",
    "AuthorizationHeaderMalformed: the region 'x' is wrong [http_response_code='400']": "refuses access",
    "Unknown [http_response_body='<html>'] [http_response_code='400']": r"refuses access \(HTTP 400\)",
    "INTERNAL: Failed to get credentials from provider: aws-c-auth: AWS_AUTH": "refuses access",
    "ABORTED: All 6 retry attempts failed: CURL error Could not connect to server [curl_code='7']": "does not answer",
    "UNAVAILABLE: SlowDown [http_response_code='503']": "cannot be read",
    "FAILED_PRECONDITION: PreconditionFailed [http_response_code='412']": "cannot be read",
    "INTERNAL: something": "cannot be read",
    "a text without a status": "cannot be read",
    "RESOURCE_EXHAUSTED: quota": "no space left",
}


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [*((SnapshotError, *each) for each in DAMAGE.items()), *((MachineError, *each) for each in NO_WORD.items())],
)
def test_a_failed_read_is_damage_or_says_nothing_about_the_snapshot(kind: type, text: str, words: str) -> None:
    told = sentence(ValueError(text), "s3://b/x", writing=False)
    assert isinstance(told, kind)
    assert re.search(words, str(told))
    assert "_response_" not in str(told)


@pytest.mark.parametrize("text", [*DAMAGE, *NO_WORD])
def test_a_failed_write_says_nothing_about_the_snapshot(text: str) -> None:
    assert isinstance(sentence(ValueError(text), "s3://b/x", writing=True), MachineError)


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(UsageError, match="starts with http"):
        SnapshotPolicy(endpoint="localhost:9000")


def test_an_object_larger_than_the_limit_is_not_read() -> None:
    place = Objects.at("memory://bounded")
    place.write("x", b"12345")
    assert place.read("x", 5) == b"12345"
    with pytest.raises(SnapshotError, match="memory://bounded/x has more than 4 bytes"):
        place.read("x", 4)
    with pytest.raises(SnapshotError, match="No such file"):
        place.read("y", 4)
