"""The command that trains settings again."""

from __future__ import annotations

from elastune.tuning.study.run_command import run_command


def test_command_names_what_decides_the_result():
    execution = {
        "workers": 2,
        "mode": "exact",
        "mechanism": "replicated",
        "num_slots": 8,
        "device": "cpu",
        "micro_batch": None,
    }
    config = {"lr": 0.05, "name": "a b", "widths": [8, 16], "flag": True}
    assert run_command({"path": "my file.py"}, config, execution, 3, 2) == (
        "elastune run 'my file.py' --workers 2 --mode exact --slots 8 --device cpu --set lr=0.05 --set 'name=a b' "
        "--set 'widths=[8, 16]' --set flag=true --epochs 2 --seed 3"
    )
    execution = {"precision": "bf16", "micro_batch": 4, "threads": 2}
    assert run_command("f.py", {}, execution) == "elastune run f.py --precision bf16 --micro-batch 4 --threads 2"


def test_command_names_the_data():
    assert run_command("f.py", {}, {}, data="/my data") == "elastune run f.py --data '/my data'"


def test_command_names_what_adapts_the_run():
    assert run_command("f.py", {}, {"policy": "none", "monitor": []}) == "elastune run f.py"
    assert run_command("f.py", {}, {"policy": "gns:max_batch=64"}) == "elastune run f.py --policy gns:max_batch=64"
    execution = {"policy": ["warmup", "gns"], "monitor": ["noise_scale:every=10"]}
    assert run_command("f.py", {}, execution) == (
        "elastune run f.py --policy warmup --policy gns --monitor noise_scale:every=10"
    )


def test_command_keeps_every_digit():
    assert "lr=0.08144886973076099" in run_command("f.py", {"lr": 0.08144886973076099}, {})


def test_command_cannot_smuggle_a_second_one():
    assert run_command("f.py; rm -rf x", {"a": "$(id)"}, {}) == "elastune run 'f.py; rm -rf x' --set 'a=$(id)'"


def test_text_that_reads_as_something_else_is_quoted():
    command = run_command("f.py", {"a": "7", "b": "true", "c": "plain", "d": 7}, {})
    assert command == """elastune run f.py --set 'a="7"' --set 'b="true"' --set c=plain --set d=7"""


def test_command_names_another_bound_of_divergence():
    assert run_command("f.py", {}, {}, divergence=None) == "elastune run f.py --divergence off"
    assert run_command("f.py", {}, {}, 1, divergence=50.0) == "elastune run f.py --divergence 50.0 --seed 1"
