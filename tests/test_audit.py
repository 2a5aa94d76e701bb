from __future__ import annotations

import json
import random
from collections import Counter

import chaos
import pytest
from builders import group, response
from chaos import judge, plan_kills
from test_resume import small_config
from test_run import Quiet

from fsdp_async.audit import CONSUMED, PHASE_BYTES, PRODUCED, GroupLog, phase_announcer, read_log, rewind_log
from fsdp_async.run import run_training


def _group(name, size=2, epoch=0):
    return group(name, [2], [response(name, i, [3, 1]) for i in range(size)], epoch=epoch)


def test_a_log_names_every_sample_and_follows_its_directory(tmp_path):
    log = GroupLog(tmp_path / "a" / PRODUCED)
    log.append(None, [_group("p"), _group("q", epoch=3)])
    (tmp_path / "a").rename(tmp_path / "b")
    log.append(7, [_group("r", size=1)])
    log.close()
    assert read_log(tmp_path / "b" / PRODUCED) == [
        {"step": None, "samples": [["p", 0, 0], ["p", 1, 0], ["q", 0, 3], ["q", 1, 3]]},
        {"step": 7, "samples": [["r", 0, 0]]},
    ]


def test_a_torn_line_is_left_out_and_rewinding_forgets_later_steps(tmp_path):
    path = tmp_path / CONSUMED
    path.write_text('{"step": 1, "samples": []}\n{"step": 2, "samples": []}\n{"step": 3, "sam')
    assert [line["step"] for line in read_log(path)] == [1, 2]
    rewind_log(path, 1)
    assert [line["step"] for line in read_log(path)] == [1]
    rewind_log(tmp_path / "none", 1)
    assert read_log(tmp_path / "none") == []


def test_the_phase_in_hand_can_be_read_at_any_time(tmp_path):
    announce = phase_announcer(tmp_path / "run" / "phase.0")
    for name in ("behaviour", "", "update"):
        announce(name)
        text = (tmp_path / "run" / "phase.0").read_text()
        assert (text.strip(), len(text)) == (name, PHASE_BYTES)


def test_both_logs_of_a_run_hold_the_same_samples(tmp_path):
    config = small_config(tmp_path, trainer={"num_batches": 3, "eval_every": 10}, run={
        "audit": True, "output_dir": str(tmp_path / "run")})  # fmt: skip
    run_training(config, Quiet())
    produced, consumed = (
        Counter(tuple(s) for line in read_log(tmp_path / "run" / name) for s in line["samples"])
        for name in (PRODUCED, CONSUMED)
    )
    assert produced == consumed
    assert set(consumed.values()) == {1}
    assert consumed.total() == 3 * 4 * 4
    assert [line["step"] for line in read_log(tmp_path / "run" / CONSUMED)] == [1, 2, 3]


@pytest.mark.parametrize("num", [1, 2, 30, 200])
def test_a_plan_has_as_many_kills_as_were_asked_for_and_ends_every_segment_with_a_start_anew(num):
    segments = plan_kills(num, random.Random(3))
    kills = [kill for segment in segments for kill in segment]
    assert len(kills) == num
    assert all(kill.victim == "engine" for segment in segments for kill in segment[:-1])
    assert all(segment[-1].victim != "engine" for segment in segments)
    if num >= 30:
        assert {kill.victim for kill in kills} == set(chaos.VICTIMS)
        assert {kill.phase for kill in kills} == set(chaos.PHASES)


def _evidence(directory, produced, consumed, **summary):
    for name, groups in ((PRODUCED, produced), (CONSUMED, consumed)):
        log = GroupLog(directory / name)
        for step, names in enumerate(groups, start=1):
            log.append(step, [_group(each, size=1) for each in names])
        log.close()
    told = {"submitted": 4, "consumed": 4, "dropped": 0, "queued": 0, "in_flight": 0}
    values = {f"samples_{key}": value for key, value in told.items()} | {"accuracy_last": 0.85} | summary
    (directory / "summary.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("produced", "consumed", "summary", "good", "told"),
    [
        (["ab", "cda"], ["ab", "cd"], {}, True, "made again 1, lost 0, doubled 0, invented 0; ledger balanced"),
        (["ab", "cde"], ["ab", "cd"], {}, False, "lost 1"),
        (["ab", "cd"], ["ab", "ca"], {}, False, "doubled 1"),
        (["ab", "c"], ["ab", "cd"], {}, False, "invented 1"),
        (["ab", "cd"], ["ab", "cd"], {"samples_consumed": 5}, False, "NOT balanced"),
        (["ab", "cd"], ["ab", "cd"], {"accuracy_last": 0.79}, False, "accuracy 0.790"),
    ],
)
def test_what_was_lost_or_doubled_is_found_by_joining_both_logs(tmp_path, produced, consumed, summary, good, told):
    _evidence(tmp_path, produced, consumed, **summary)
    text, verdict = judge(tmp_path)
    assert verdict is good
    assert told in text
