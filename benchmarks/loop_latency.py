"""How late does a daemon's event loop run while a 100 MB model is exchanged?

Two real daemons on this machine, each with a trainer that holds 25 million float32 values and moves them a little each
step. Once with the `always` trigger, so that exchanges never stop, and once with a trigger that never fires: what is
left then is the machine's own noise. Prints what `peerd status` says.

    python benchmarks/loop_latency.py [--codec sign] [--seconds 30] [--format json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from peerd.cli.demo.local_swarm import LocalSwarm

VALUES = 25_000_000
TRAINER = f"""
import time, torch, peerd
torch.set_num_threads(1)
model = torch.nn.Linear({VALUES // 1000 - 1}, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with peerd.attach(model, optimizer) as swarm:
    while True:
        with torch.no_grad():
            model.bias.add_(torch.randn(1000))
        swarm.step()
        time.sleep(0.2)
"""


def _measure(script: str, codec: str, trigger: str, seconds: float) -> dict[str, Any]:
    settings = {"--wait-for": "2", "--codec": codec, "--trigger": trigger}
    with LocalSwarm(2, settings, [script]) as swarm:
        while any((swarm.status(name)["trainer"] or {"step": 0})["step"] < 10 for name in swarm.names):
            time.sleep(0.5)
        before = {name: swarm.status(name) for name in swarm.names}
        time.sleep(seconds)
        after = {name: swarm.status(name) for name in swarm.names}
    return {
        "trigger": trigger,
        "codec": codec,
        "model_mb": VALUES * 4 / 1e6,
        "seconds": seconds,
        "exchanges": min(after[name]["exchanges"] - before[name]["exchanges"] for name in after),
        "sent_mb": sum(after[name]["bytes_sent"] - before[name]["bytes_sent"] for name in after) / 1e6,
        "loop_latency_p50_ms": max(status["loop_latency_p50_s"] for status in after.values()) * 1e3,
        "loop_latency_p99_ms": max(status["loop_latency_p99_s"] for status in after.values()) * 1e3,
    }


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", default="sign")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(TRAINER)
        rows = [_measure(str(script), options.codec, trigger, options.seconds) for trigger in ("always", "change:1e9")]
    if options.format == "json":
        print(json.dumps(rows))
        return
    for key in rows[0]:
        print(f"{key:<22}" + "".join(f"{_shown(row[key]):>14}" for row in rows))


if __name__ == "__main__":
    main()
