"""Which words of a command line are shown, and which are not."""

import pytest

from mt_resilient.resilience.text.secrets import hidden, hidden_line


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("--wandb-api-key=s3", "--wandb-api-key=***"),
        ("--hf-token s3 --steps 9", "--hf-token *** --steps 9"),
        ("--HF_TOKEN s3", "--HF_TOKEN ***"),
        ("--apikey=s3", "--apikey=***"),
        ("-token s3", "-token ***"),
        ("--password 's3 of two words'", "--password ***"),
        ("'--password=s3 of two words'", "--password=***"),
        ("--aws-secret-access-key s3 --aws-credentials=s3", "--aws-secret-access-key *** --aws-credentials=***"),
        ("env WANDB_API_KEY=s3 python a.py", "env WANDB_API_KEY=*** python a.py"),
        ("--set hooks.on_incident=https://example.com/s3", "--set hooks.on_incident=***"),
        ("--set=hooks.on_incident=https://example.com/s3", "--set=hooks.on_incident=***"),
        ("+logger.api_key=s3 ++logger.token=s3", "+logger.api_key=*** ++logger.token=***"),
        ("--snapshots s3://me:s3@host/bucket", "--snapshots s3://***@host/bucket"),
        ("--data 'https://host/a?token=s3&b=1'", "--data 'https://host/a?token=***&b=1'"),
        ("""--logger '{"api_key": "s3", "b": 1}'""", """--logger '{"api_key": "***", "b": 1}'"""),
        ("bash -c 'cd a; HF_TOKEN=s3 b.py --wandb-key s3'", "bash -c 'cd a; HF_TOKEN=*** b.py --wandb-key ***'"),
        ("bash -c 'HF_TOKEN=s3 b.py'", "bash -c HF_TOKEN=***"),
        ("--use-token --steps 9", "--use-token --steps 9"),
    ],
)
def test_what_is_called_like_a_secret_is_not_shown(given: str, shown: str) -> None:
    assert hidden_line(f"cd '/a b' && run {given}") == f"cd '/a b' && run {shown}"


@pytest.mark.parametrize(
    "line",
    [
        "cd '/a b' && mt-resilient run --run-dir /runs/keys -- torchrun --nproc-per-node 2 train.py --steps 9",
        "torchrun pretrain.py --tokenizer-type GPT2BPETokenizer --tokenizer-model /a --max-tokens 5 --json-keys text",
        "bash -c 'python a.py --tokenizer x; echo the key is here'",
        "run --snapshots s3://bucket/a --etcd http://host:2379",
    ],
)
def test_all_else_is_shown_as_it_was_given(line: str) -> None:
    assert hidden_line(line) == line


def test_words_are_hidden_one_by_one() -> None:
    assert hidden(["torchrun", "a b.py", "--token", "s3"]) == ["torchrun", "a b.py", "--token", "***"]
