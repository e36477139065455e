"""In an agent's place where only the way to it is tested: says where it is, then does as its second argument says.

NODE exit CODE · NODE wait (until a signal, each of which it tells) · NODE deaf (wants two) · NODE talk (prints without end)
"""

import os
import signal
import sys
import time
from pathlib import Path

node, what = sys.argv[1:3]
heard: list[str] = []


def on_signal(number: int, _: object) -> None:
    heard.append(signal.Signals(number).name)
    Path(f"{node}.heard").write_text(" ".join(heard))
    os.write(1, f"heard {heard[-1]}\n".encode())  # `print` fails while the interrupted `print` holds the stream


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, on_signal)
print(f"in {os.getcwd()} with {os.environ.get('NCCL_TEST_WORD', 'nothing')}", flush=True)
print("and on stderr", file=sys.stderr, flush=True)
Path(f"{node}.pid").write_text(str(os.getpid()))
if what == "exit":
    sys.exit(int(sys.argv[3]))
while len(heard) < (2 if what == "deaf" else 1):
    if what == "talk":
        print("talking " * 1000, flush=True)
    time.sleep(0.02)
sys.exit(128 + signal.Signals[heard[0]])
