"""What the documentation names must exist: settings, files, links, commands, numbers."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import inspect
import pkgutil
import re
import runpy
import shlex

import pytest
import torch
import torch.distributed.checkpoint
from documents import DOCS, PAGES, ROOT, arguments_of, blocks, cells, code_words, prose, shell_lines

import fsdp_async
from fsdp_async.cli import config_directory, main
from fsdp_async.config import Config
from fsdp_async.config_reference import sections
from fsdp_async.is_correction import Bounds, CorrectionConfig, Rejection, compute_correction
from fsdp_async.state_cache import StateCache
from fsdp_async.summary import summarize

SECTIONS = [field.name for field in dataclasses.fields(Config)]
KEYS = {f"{path}.{key.name}" for section in sections() for path in section.paths for key in section.keys}
GROUPS = {path.name for path in config_directory().iterdir() if path.is_dir()}
SUFFIXES = {"py", "md", "json", "jsonl", "yaml", "safetensors"}
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def _text(page):
    """A page without programs and output, which test_docs_run.py holds, and without other projects' options."""
    text = re.sub(r"^```(python|text)\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    if page.name == "from_verl_and_trl.md":
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    return text


def test_the_configuration_page_is_made_from_the_dataclasses():
    made = runpy.run_path(str(DOCS / "make_configuration.py"))["page"]()
    shown = (DOCS / "configuration.md").read_text()
    assert shown == made, "run python docs/make_configuration.py"


@by_page
def test_every_setting_that_is_named_exists(page):
    named = set(re.findall(rf"(?<![\w./'\"])((?:{'|'.join(SECTIONS)})(?:\.[a-z]\w*)+)", _text(page)))
    wrong = []
    for name in named:
        section, _, rest = name.partition(".")
        is_file, is_method = rest.rpartition(".")[2] in SUFFIXES, section == "cache" and hasattr(StateCache, rest)
        if name not in KEYS and not is_file and not is_method:
            wrong.append(name)
    assert wrong == []


@by_page
def test_every_choice_of_a_group_that_is_named_exists(page):
    named = re.findall(rf"(?<![\w.])({'|'.join(GROUPS)})=([a-z][\w.]*\w)", _text(page))
    assert [choice for choice in named if not (config_directory() / choice[0] / f"{choice[1]}.yaml").is_file()] == []


@by_page
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


@by_page
def test_every_file_of_the_repository_that_is_named_exists(page):
    places = r"(?:fsdp_async|tests|docs|conf|examples|benchmarks)/[\w./*-]*\w"
    named = [word for word in code_words(page) if re.fullmatch(places, word)]
    named += [word for line in shell_lines(page) for word in re.findall(rf"(?<![\w/]){places}", line)]
    assert [word for word in named if not list(ROOT.glob(word))] == []


@by_page
def test_every_target_of_make_that_is_named_exists(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [line for line in [*code_words(page), *shell_lines(page)] if "make " in line]
    assert {target for line in named for target in re.findall(r"\bmake ([a-z][\w-]*)", line)} - targets == set()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with the files that a reader is told to bring."""
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"prompt": "{n}=", "answer": "{n}"}}\n' for n in range(200)))
    (tmp_path / "my_reward.py").write_text("def reward(prompt_text, response_text, info):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)


@by_page
def test_every_command_line_composes(page, place, capsys):
    for line in [*shell_lines(page), *code_words(page)]:
        arguments = arguments_of(line)
        if not arguments:
            continue
        command, *rest = arguments
        if command in ("train", "plan"):
            if not any(re.search(r"\b[A-Z]{3,}\b|^--|^\.\.\.$", word) for word in rest):  # a form, not a line
                assert main(["plan", *rest]) == 0, f"{line}: {capsys.readouterr().err}"
        elif rest:
            # What cannot be parsed ends the program by SystemExit; what is named is not here.
            assert main(arguments) == 1
        else:
            with pytest.raises(SystemExit, match="0"):
                main([command, "--help"])


def test_every_setting_of_the_correction_page_acts(capsys):
    page = DOCS / "correction.md"
    settings = [word for word in code_words(page) if re.match(r"'?(correction|loss|advantages)\.\w+=", word)]
    assert len(settings) >= 30
    for setting in settings:
        if "correction.denominator=original" in setting:
            continue  # the default, named in a sentence
        # It must change the config, and be accepted by whatever refuses options that cannot act.
        assert main(["plan", "correction=disabled", *shlex.split(setting)]) == 0, (
            f"{setting}: {capsys.readouterr().err}"
        )


def test_the_correction_page_lists_every_preset_and_every_choice():
    page = DOCS / "correction.md"
    words = {word for row in cells(page) for word in re.findall(r"`([^`]+)`", row[0])}
    assert {path.stem for path in (config_directory() / "correction").glob("*.yaml")} <= words
    text = page.read_text()
    for section in sections():
        for path in section.paths:
            if path.split(".")[0] in ("correction", "loss", "advantages"):
                shown = [choice for key in section.keys for choice in key.choices]
                assert [choice for choice in shown if choice not in text] == []
    assert set(next(key for key in _section("trainer").keys if key.name == "anchor").choices) <= words


def _section(path):
    return next(section for section in sections() if path in section.paths)


def test_every_name_of_a_number_or_a_function_exists():
    """Words such as `skip_reasons`: in the package, in torch, or in a program of the same page."""
    source = "\n".join(path.read_text() for place in ("fsdp_async", "tests") for path in (ROOT / place).rglob("*.py"))
    source += " ".join([*KEYS, *dir(torch), *dir(torch.distributed.checkpoint)])
    wrong = []
    for page in PAGES:
        if page.name == "from_verl_and_trl.md":
            continue  # most of its words are theirs; settings of ours have a test of their own
        known = source + "".join(block.text for block in blocks(page))
        named = re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+)+)`", page.read_text())
        wrong += [(page.name, word) for word in named if not re.search(rf"\b{word}\b", known)]
    assert wrong == []


def test_every_number_that_is_measured_of_a_factor_is_explained():
    mask, sides = torch.ones(2, 3, dtype=torch.bool), [torch.rand(2, 3).log() for _ in range(3)]
    bounds = Bounds(lower=0.5, upper=2.0)
    config = CorrectionConfig(mismatch=bounds, lag=bounds, rejections=(Rejection(upper=2.0),))
    measured = compute_correction(sides[0], sides[1], mask, config, behaviour_log_prob=sides[2]).metrics()
    page = (DOCS / "correction.md").read_text()
    table = page[page.index("## What is measured") : page.index("## What is refused")]
    explained = set(re.findall(r"`([\w/]+)`", table))
    names = {name.removeprefix("mismatch/") for name in measured if name.startswith("mismatch/")}
    assert names <= explained
    numbers = {word for row in cells(DOCS / "correction.md") if row[0] in table for word in _words_of(row)}
    assert {word for word in numbers if word in table} - names == set(), "these are not measured"


def _words_of(row):
    return re.findall(r"`(\w+/?\w+)`", row[0])


def test_getting_started_explains_every_line_of_the_summary():
    rows = cells(DOCS / "getting_started.md")
    explained = {word for row in rows for word in re.findall(r"`([\w.]+)`", row[0])}
    assert set(summarize([])) <= explained


def test_the_readme_lists_every_page():
    linked = set(re.findall(r"\]\(docs/(\w+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {path.name for path in DOCS.glob("*.md")}


def test_the_names_that_the_design_promises_exist():
    names = {module.name for module in pkgutil.iter_modules(fsdp_async.__path__)}
    # These are run by themselves, or import what may not be installed.
    modules = [importlib.import_module(f"fsdp_async.{n}") for n in names if not n.endswith(("_backend", "__main__"))]
    known = set(dir(builtins))
    for module in modules:
        for name, value in vars(module).items():
            known.add(name)
            if inspect.isclass(value) and value.__module__.startswith("fsdp_async"):
                known |= set(dir(value))
    code = "\n".join(block.text for block in blocks(DOCS / "design.md") if block.language == "python")
    called = set(re.findall(r"\b([A-Za-z]\w+)\(", re.sub(r"#.*", "", code)))
    assert len(called) > 40
    assert called - known == set()
