"""Measure what a Prometheus needs that scrapes the agents of a large job: memory, and bytes on disk.

    python benchmarks/scrape.py [--agents N] [--interval SECONDS] [--rounds N]

One server stands in for all agents and has a path for each agent. It answers with the real exposition of an agent with eight ranks,
compressed with gzip as the agents do. The values change as they do while a job trains. Debian's Prometheus scrapes all of them. The memory
figure is Prometheus' largest resident memory. The disk figure is its write-ahead log, which Prometheus later turns into smaller blocks.
Queries and rules are not measured.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
from measure import Result, arguments, count, report, say
from prometheus_client import generate_latest

from mt_resilient.agent.launch.ports import free_ports
from mt_resilient.resilience.report.metrics import Metrics

_RANKS = 8


class Agents:
    """All agents, as one server on a port of its own."""

    def __init__(self) -> None:
        self.metrics, self.step, self.scrapes, self.text = Metrics("gpt", "gpu-01"), 0, 0, b""
        self.metrics.disks({"run directory": Path("/"), "snapshots": Path("/")})
        self.train()

    def train(self) -> None:
        """Advance the values by one second of training."""
        self.step += 1
        self.metrics.now(
            step=self.step, generation=1, alive=_RANKS, paused=False, stall_s=self.step / 500, effective=0.99
        )
        self.metrics.progress(2 + 1 / self.step, 1 + self.step % 7 / 100)
        self.metrics.etcd(0.002 + self.step % 5 / 1000)
        self.metrics.spend("training", 0.999)
        self.metrics.strides(0, {rank: 1 + (self.step + rank) % 9 / 100 for rank in range(_RANKS)})
        self.metrics.staged(_RANKS, 0)
        self.text = generate_latest(self.metrics.registry)
        body = gzip.compress(self.text, 6)
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Encoding: gzip\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self.answer, self.size = head.encode() + body, len(body)

    def serve(self, port: int) -> None:
        async def answer(asked: asyncio.StreamReader, answered: asyncio.StreamWriter) -> None:
            with suppress(EOFError, ConnectionError):
                while await asked.readuntil(b"\r\n\r\n"):
                    self.scrapes += 1
                    answered.write(self.answer)
                    await answered.drain()

        async def run() -> None:
            await asyncio.start_server(answer, "127.0.0.1", port, backlog=4096)
            while True:
                self.train()
                await asyncio.sleep(1)

        threading.Thread(target=asyncio.run, args=(run(),), daemon=True).start()


def main() -> None:
    parser = arguments(__doc__)
    for name, usual in (("--agents", 10_000), ("--interval", 60), ("--rounds", 3)):
        parser.add_argument(name, type=count, default=usual, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    agents, (port, here) = Agents(), free_ports(2)
    agents.serve(port)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        targets = [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"__metrics_path__": f"/{n}", "instance": f"gpu-{n:05d}:9464", "node": f"gpu-{n:05d}"},
            }
            for n in range(options.agents)
        ]
        (folder / "targets.json").write_text(json.dumps(targets))
        (folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {options.interval}s, scrape_timeout: {min(options.interval, 30)}s}}\n"
            "scrape_configs: [{job_name: gpt, honor_labels: true, file_sd_configs: [{files: [targets.json]}]}]\n"
        )
        words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        words.append(f"--web.listen-address=127.0.0.1:{here}")
        with (folder / "log").open("wb") as log:
            server = psutil.Popen(["prometheus", *words], stdout=log, stderr=log)
        try:
            largest, until = 0, time.monotonic() + options.interval * (options.rounds + 5)
            while agents.scrapes < options.rounds * options.agents and time.monotonic() < until:
                time.sleep(1)
                largest = max(largest, server.memory_info().rss)
            time.sleep(options.interval / 4)  # the last answers are still being stored
            largest = max(largest, server.memory_info().rss)
            cpu = server.cpu_times()
            with urllib.request.urlopen(
                f"http://127.0.0.1:{here}/api/v1/query?query=prometheus_tsdb_head_series"
            ) as told:
                json.load(told)
            with urllib.request.urlopen(f"http://127.0.0.1:{here}/metrics") as told:
                lines = dict(line.rsplit(" ", 1) for line in told.read().decode().splitlines() if line[0] != "#")
            series, samples = float(lines["prometheus_tsdb_head_series"]), _samples(lines)
            disk = sum(file.stat().st_size for file in (folder / "data" / "wal").rglob("*") if file.is_file())
        except BaseException:
            say((folder / "log").read_text()[-2000:])
            raise
        finally:
            server.kill()  # an orderly end would take minutes, and the data is deleted anyway
            server.wait()
    say(f"{agents.scrapes} scrapes")
    report(
        "scrape",
        [
            Result("agents", options.agents, ""),
            Result("series", series, ""),
            Result("scrapes per agent", agents.scrapes / options.agents, ""),
            Result("samples stored, of those that were answered", samples / agents.scrapes / _lines(agents.text), ""),
            Result("largest resident memory of Prometheus", largest / 1e9, "GB"),
            Result("memory per series", largest / series / 1e3, "kB"),
            Result("write-ahead log per sample, names of the series included", disk / samples, "bytes"),
            Result("write-ahead log", disk / 1e9, "GB"),
            Result("processor time per scrape", (cpu.user + cpu.system) / agents.scrapes * 1e3, "ms"),
            Result("one answer of an agent", len(agents.text) / 1e3, "kB"),
            Result("one answer of an agent, in gzip", agents.size / 1e3, "kB"),
        ],
    )


def _lines(text: bytes) -> int:
    return (
        sum(not line.startswith(b"#") for line in text.splitlines()) + 5
    )  # `up` and four more that Prometheus adds to each scrape


def _samples(lines: dict[str, str]) -> float:
    return sum(
        float(value) for name, value in lines.items() if name.startswith("prometheus_tsdb_head_samples_appended_total")
    )


if __name__ == "__main__":
    main()
