"""The only module that reads the clock. Every other function that makes a decision gets the time as an argument."""

from __future__ import annotations

import time

wall_s = time.time
"""Seconds since the epoch: for times that people read, and for records that leave this node."""

monotonic_s = time.monotonic
"""Seconds on CLOCK_MONOTONIC, which all processes of a node share: for durations and heartbeats."""

monotonic_ns = time.monotonic_ns

thread_ns = time.thread_time_ns
"""Processor time of the calling thread, in nanoseconds."""

sleep = time.sleep
