"""Hostfiles that people have, and a sentence with its line's number for each that cannot be meant."""

import pytest

from mt_resilient.agent.ssh.hostfile import Host, alike, parse
from mt_resilient.resilience.errors import UsageError

FILE = """
# our machines
gpu-01 slots=8
gpu-02   slots=8   rack=r1 type=S4000   # the new one
train@10.0.0.7 port=2222 name=gpu-03

[fe80::1] max_slots=8
"""


def test_all_forms_of_a_line_are_understood() -> None:
    assert parse(FILE, "hosts") == (
        Host(node="gpu-01", host="gpu-01", slots=8),
        Host(node="gpu-02", host="gpu-02", slots=8, labels={"rack": "r1", "type": "S4000"}),
        Host(node="gpu-03", host="10.0.0.7", user="train", port=2222),
        Host(node="fe80--1", host="fe80::1"),
    )

    assert parse("::1 name=a", "hosts") == (Host(node="a", host="::1"),)


@pytest.mark.parametrize(
    "text",
    ["\ufeffa slots=8\r\nb slots=8\r\n", "127.0.0.1 name=a\n127.0.0.1 name=b"],
    ids=["as an editor of Windows writes it", "one machine with two nodes"],
)
def test_two_lines_are_two_nodes(text: str) -> None:
    assert [host.node for host in parse(text, "hosts")] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "hosts names no host"),
        ("# a\n\n", "hosts names no host"),
        ("a\nb\na slots=8", "hosts, line 3: a is on line 1 already"),
        ("a\nb name=a", "hosts, line 2: a is on line 1 already"),
        ("a:8", "hosts, line 1: a:8 may mean a port, or a number of ranks as in MPICH; write a with port=N or slots=N"),
        ("\na 8", "hosts, line 2: 8 is no setting"),
        ("a slots= 8", "hosts, line 1: slots= is no setting"),
        ("a =8", "hosts, line 1: =8 is no setting"),
        ("a slots=8 slots=8", "hosts, line 1: slots is given twice"),
        ("a slots=0", "hosts, line 1: slots=0 is no number from 1 to 4096"),
        ("a slots=many", "slots=many is no number"),
        ("a port=70000", "port=70000 is no number from 1 to 65535"),
        ("-oProxyCommand=x", "-oProxyCommand=x is no host"),
        ("-l@a", "-l@a is no host"),
        ("a;b", "a;b is no host"),
        ("a name=b/c", "name=b/c is no name of a node"),
        ("@a", "@a is no host"),
        ("a rack=r1,r2", "rack=r1,r2 has a comma"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "hosts")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_hosts_that_give_slots_give_the_same_number() -> None:
    alike(parse("a\nb", "hosts"))
    alike(parse("a slots=4\nb", "hosts"))
    with pytest.raises(UsageError, match=r"gives a slots=4 and b slots=8"):
        alike(parse("a slots=4\nb slots=8", "hosts"))
