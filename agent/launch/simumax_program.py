"""Asks SimuMax which of several layouts fits into the devices' memory and trains fastest. The agent runs this file in a process of its own
(`layout_adviser.py`), because SimuMax may be slow or fail. This file imports nothing of this package.

stdin: one JSON object → stdout: a JSON line for each number of ranks and each layout that is better than the ones before it.
Written for SimuMax 1.2 (`PerfLLM`, github.com/MooreThreads/SimuMax).
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Any

MARGIN_GIB = 6
"""What SimuMax does not count: buffers of the collectives, the allocator, the runtime. SimuMax's own searches leave this much memory free
by default."""


def usage(asked: dict[str, Any], ranks: int, layout: dict[str, Any]) -> tuple[float, float]:
    """Return the GiB that the fullest stage needs, and the share of the devices' speed that is used (MFU)."""
    from simumax.core import config, perf_llm  # type: ignore[import-not-found]

    given = {key: value for key, value in layout.items() if key != "options"}
    strategy = config.StrategyConfig(**asked["strategy"], **given, world_size=ranks)
    strategy.reset_global_batch_size(asked["global_batch_size"])
    model = perf_llm.PerfLLM()
    model.configure(
        strategy_config=strategy,
        model_config=config.ModelConfig.init_from_config_file(asked["model"]),
        system_config=config.SystemConfig.init_from_config_file(asked["system"]),
    )
    model.run_estimate()
    needed = model.get_pp_stage_peak_mem(model.analysis_mem(), "peak_mem_with_reserved", toG=True)
    return max(needed.values()), model.analysis_cost().data["mfu"]


def main() -> None:
    asked = json.load(sys.stdin)
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        from simumax.core import config  # type: ignore[import-not-found]

        model = config.ModelConfig.init_from_config_file(asked["model"])
        gib = config.SystemConfig.init_from_config_file(asked["system"]).accelerator.mem_gbs - MARGIN_GIB
        for name, value in asked["facts"].items():
            if getattr(model, name) != value:
                said = f"its model has {name} {getattr(model, name)}, and the script {value}"
                print(json.dumps({"refused": said}), file=answers, flush=True)
                return
        for ranks, layouts in asked["layouts"].items():
            best = 0.0
            for layout in layouts:
                try:
                    needed, mfu = usage(asked, int(ranks), layout)
                except (AssertionError, ValueError, ZeroDivisionError, NotImplementedError) as error:
                    print(f"{layout['options']}: {error}", file=sys.stderr)
                    continue
                if needed <= gib and mfu > best:
                    best = mfu
                    answer = {"ranks": int(ranks), "options": layout["options"]}
                    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
