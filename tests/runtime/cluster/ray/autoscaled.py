"""A Ray whose autoscaler adds and removes nodes, and a run on it: in namespaces of their own, with which all ends.

``autoscaled.py FOLDER PROGRAM`` prints what it saw as JSON. Nodes are processes of this machine (Ray's provider for
tests, which its package has; the example of its configuration, which ``AutoscalingCluster`` reads, is not in there).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 120.0
STORE_BYTES = 80 << 20
HEAD = "ray.head.default"  # the provider knows no other
NODE = {
    "resources": {"CPU": 2, "object_store_memory": STORE_BYTES},
    "node_config": {},
    "min_workers": 0,
    "max_workers": 2,
}
NOTHING: list[str] = []
EMPTY = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
EMPTY += ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
CONFIGURATION = {
    "cluster_name": "made-up",
    "max_workers": 2,
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "available_node_types": {HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}, "two": NODE},
    "head_node_type": HEAD,
    "auth": {},
    "docker": {},
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.05,
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    **dict.fromkeys(EMPTY, NOTHING),
}
ELASTUNE = [sys.executable, "-m", "elastune"]


def start(folder: Path) -> None:
    """Ray's head, with room for nothing."""
    (folder / "autoscaler.json").write_text(json.dumps(CONFIGURATION))
    options = ["--head", "--num-cpus=0", f"--object-store-memory={STORE_BYTES}", "--include-dashboard=false"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    environment = {**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    with (folder / "ray").open("wb") as said:
        scaling = f"--autoscaling-config={folder / 'autoscaler.json'}"
        subprocess.run([*command, scaling], check=True, stdout=said, stderr=said, env=environment)


def nodes() -> int:
    """How many there are, beside the head."""
    import ray

    return sum(node["Alive"] for node in ray.nodes()) - 1


def main(folder: Path, program: str) -> None:
    """Grow from no node to two, be resized to what one has room for, and end."""
    import ray

    start(folder)
    ray.init("auto", log_to_driver=False)
    seen = {"before": nodes()}
    slow = ["--set", "epochs=12", "--set", "plain=true", "--set", "pause_s=0.3", "--set", f"until={folder / 'go'}"]
    where = ["--cluster", "ray:workers_per_node=2,idle_s=0", "--workers", "1:4", "--seed", "3"]
    out = folder / "run"
    with (folder / "said").open("wb") as said, (folder / "result").open("wb") as result:
        command = [*ELASTUNE, "run", program, *slow, *where, "--json", "--out", str(out)]
        run = subprocess.Popen(command, stdout=result, stderr=said)

    def until(true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, (folder / "said").read_text()
            assert run.poll() is None, (folder / "said").read_text()
            time.sleep(0.1)

    until(lambda: (folder / "said").read_text().count("has come") == 2)
    seen["grown"] = nodes()
    until(lambda: (out / "journal.jsonl").exists() and '"kind":"reported"' in (out / "journal.jsonl").read_text())
    asked = subprocess.run([*ELASTUNE, "resize", str(out), "2"], capture_output=True, text=True)
    seen["resized"] = asked.returncode
    until(lambda: nodes() == 1)
    seen["shrunk"] = nodes()
    (folder / "go").touch()
    seen["code"] = run.wait(LIMIT_S)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
