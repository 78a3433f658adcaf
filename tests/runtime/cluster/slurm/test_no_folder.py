"""Nodes that see nothing of a run's folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from elastune.runtime.clusters.slurm import Jobs
from elastune.runtime.clusters.slurm_commands import JobShape, agent_command, batch_script, srun_arguments


def test_nodes_that_share_no_folder_read_their_token(tmp_path: Path) -> None:
    token = "it's-$(a)-`token`-\\n"
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\nexec cat\n")
    agent.chmod(0o755)
    script = batch_script(agent_command(str(agent), "10.0.0.1:7", None, 4), 90, token).replace("srun", "true")
    assert "--token-file /dev/stdin" in script
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == f"{token}\n"
    assert Jobs([], JobShape(), tmp_path, "elastune-1", token).why("7") == "see /tmp/elastune-agent-7.log on its node"
    assert srun_arguments("n1", reads=True)[4] == "--input=all"
