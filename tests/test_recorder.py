from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from fsdp_async.loggers import Loggers, LoggingConfig
from fsdp_async.recorder import Recorder
from fsdp_async.run_dir import RunDirectory

LEDGER = dict.fromkeys(("submitted", "produced", "consumed", "dropped", "queued", "in_flight"), 0)
BASE = {"time_s": 1.0, "ledger": LEDGER, "trainer_spans": [], "engine_spans": []}
STEP = BASE | {
    "num_tokens": 2,
    "staleness_total": 1,
    "staleness_max": 1,
    "behaviour_versions": [0],
    "num_optimizer_steps": 1,
    "num_skipped_steps": 0,
    "canary_gap_nats": {},
    "factors": {},
}


def test_old_results_stay_until_the_first_step_and_the_summary_follows_from_the_events(tmp_path):
    target = tmp_path / "run"
    target.mkdir()
    (target / "run.json").write_text("{}")
    (target / "summary.json").write_text('"old"')
    with (
        RunDirectory(target, overwrite=True) as directory,
        Loggers(LoggingConfig(tensorboard=False), directory.path) as loggers,
    ):
        recorder = Recorder(directory, loggers)
        recorder.observe("publication", 0, BASE | {"version": 0, "cache_bytes": 0})
        assert json.loads((target / "summary.json").read_text()) == "old"
        recorder.observe("step", 1, STEP)
        assert not (target / "summary.json").exists()
        shared = torch.tensor([True, False])
        recorder.record_batch(1, {"a": shared, "b": shared})
        recorder.observe("end", 1, BASE | {"outcome": "completed", "version": 0})
        summary = recorder.finish()
    assert json.loads((target / "summary.json").read_text()) == summary
    assert (summary["outcome"], summary["num_batches"], summary["staleness_mean"]) == ("completed", 1, 0.5)
    assert [json.loads(line)["event"] for line in (target / "metrics.jsonl").read_text().splitlines()] == [
        "publication",
        "step",
        "end",
    ]
    recorded = load_file(target / "batches" / "step_000001.safetensors")
    assert torch.equal(recorded["a"], recorded["b"]), "two names of one tensor are both written"
    assert len(list(tmp_path.glob("run.old-*"))) == 1
