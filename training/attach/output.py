"""Puts the agent's pipes or terminals in place of this rank's stdout and stderr, so that the agent can keep what the rank prints. Only
streams that lead to the agent's own stdout or stderr are replaced: a stream that torchrun redirects stays redirected."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from ...resilience.ipc.descriptor_client import opened
from ...resilience.ipc.handoff import Output


def print_through_the_agent(outputs: Sequence[Output], local_rank: int) -> None:
    """outputs: the agent's own streams, with the file for each local rank. If such a file cannot be opened, the stream stays as it is."""
    for number in (1, 2):
        with suppress(OSError):
            now = os.fstat(number)
            for output in outputs:
                if (now.st_dev, now.st_ino) == (output.device, output.inode):
                    through = opened(output.paths[local_rank], os.O_WRONLY | os.O_NOCTTY)
                    os.dup2(through, number)
                    os.close(through)
                    break
