"""The only module that reads the clock. Every function that decides takes the time as an argument."""

from __future__ import annotations

import time

wall_s = time.time
"""Seconds since the epoch: for people and for records that leave this node."""

monotonic_s = time.monotonic
"""Seconds on CLOCK_MONOTONIC, which every process of one node shares: for durations and heartbeats."""

monotonic_ns = time.monotonic_ns

thread_ns = time.thread_time_ns
"""Processor time of the calling thread."""

sleep = time.sleep
