"""Options of policies, from the configuration to the policy that gets them."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from batond.daemon.config_load import engine_settings, load_settings, parse_assignments
from batond.daemon.errors import ConfigError
from batond.daemon.wire.settings import EngineSettings
from batond.policies.deadline import Deadline
from batond.policies.fair import Fair
from batond.policies.mlfq import Mlfq
from batond.policies.priority import Priority
from batond.policies.registry import check_configured, load_configured, load_policy

FILE = """
[engine]
policy = "deadline"
[policy_options.deadline]
token_s = 0.012
margin_s = 1
[policy_options.mlfq]
quantum_tokens = 8
preempt_alike = true
"""


def told(tmp_path: Path, text: str, flags: dict[str, object] | None = None) -> EngineSettings:
    """What the engine reads, by way of a file and of the engine's JSON."""
    file = tmp_path / "batond.toml"
    file.write_text(f"[model]\npath = '{tmp_path}'\n{text}")
    made = engine_settings(load_settings(file, flags))
    return msgspec.json.decode(msgspec.json.encode(made), type=EngineSettings)


def test_options_of_the_file_reach_the_policies(tmp_path: Path) -> None:
    """Each policy gets its own, the one at the start and those it is exchanged for; others their defaults."""
    settings = told(tmp_path, FILE)
    check_configured(settings.policy_options)
    deadline = load_configured(settings.policy, settings.policy_options)
    assert isinstance(deadline, Deadline)
    assert (deadline._token_s, deadline._prefill_token_s, deadline._margin_s) == (0.012, 0.0002, 1)
    mlfq = load_configured("mlfq", settings.policy_options)
    assert isinstance(mlfq, Mlfq)
    assert (mlfq._quanta[:2], mlfq._preempt_alike) == ((8, 16), True)
    priority = load_configured("priority", settings.policy_options)
    assert isinstance(priority, Priority)
    assert priority.ageing_s == 60.0


def test_environment_and_flags_win_option_by_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATOND_POLICY_OPTIONS__DEADLINE__MARGIN_S", "0.25")
    monkeypatch.setenv("BATOND_POLICY_OPTIONS__MLFQ__PREEMPT_ALIKE", "false")
    monkeypatch.setenv("BATOND_POLICY_OPTIONS__FAIR__AGEING_S", "5")
    flags = parse_assignments(["policy_options.fair={output_weight = 2.0}"])
    options = told(tmp_path, FILE, flags).policy_options
    assert options == {
        "deadline": {"token_s": 0.012, "margin_s": 0.25},
        "mlfq": {"quantum_tokens": 8, "preempt_alike": False},
        "fair": {"ageing_s": 5, "output_weight": 2.0},
    }
    fair = load_configured("fair", options)
    assert isinstance(fair, Fair)
    assert (fair.ageing_s, fair._output_weight, fair._prompt_weight) == (5, 2.0, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[policy_options]\ndeadline = 3\n", r"policy_options\.deadline: .*dictionary"),
        (
            "[policy_options.fair]\nageing_s = 'soon'\n",
            r"policy_options\.fair\.ageing_s: neither a finite number",
        ),
        (
            "[policy_options.fair]\nageing_s = [1]\n",
            r"policy_options\.fair\.ageing_s: neither a finite number",
        ),
        (
            "[policy_options.fair]\nageing_s = inf\n",
            r"policy_options\.fair\.ageing_s: neither a finite number",
        ),
        ("[policy_option.fair]\nageing_s = 3\n", "did you mean 'policy_options'"),
    ],
)
def test_what_no_policy_could_take_stops_the_configuration(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        told(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deadline", {"tokens_s": 1.0}, "policy 'deadline' has no option 'tokens_s'; did you mean 'token_s'"),
        ("fcfs", {"zzz": 1}, "policy 'fcfs' has no option 'zzz'; it has none"),
        ("fair", {"zzz": 1}, "'zzz'; it has prompt_weight, output_weight, ageing_s"),
        ("mlfq", {"queues": 2.5}, "policy 'mlfq': queues must be a whole number, not 2.5"),
        ("mlfq", {"queues": True}, "policy 'mlfq': queues must be a whole number, not True"),
        ("mlfq", {"preempt_alike": 1}, "policy 'mlfq': preempt_alike must be true or false, not 1"),
        ("shortest", {"gain": True}, "policy 'shortest': gain must be a number, not True"),
        ("shortest", {"gain": float("nan")}, "policy 'shortest': gain must be a number, not nan"),
        ("shortest", {"gain": 1.0}, "policy 'shortest': gain must be above 1, not 1.0"),
        ("nobody", {}, "unknown policy 'nobody'; known policies"),
    ],
)
def test_option_that_a_policy_has_not_stops_the_start(
    name: str, options: dict[str, bool | int | float], message: str
) -> None:
    """Also where the policy is not the one at the start: an exchange would be too late to find out."""
    with pytest.raises(ConfigError) as raised:
        check_configured({"priority": {"ageing_s": 5}, name: options})
    assert message in raised.value.message
    assert raised.value.details["policy"] == name


def test_the_example_shows_every_option_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "systemd" / "batond.toml").read_text(encoding="utf-8")
    (section,) = re.findall(r"^\[policy_options\]\n((?:#.+\n)+)", text, flags=re.MULTILINE)
    shown = tomllib.loads(section.replace("#", ""))
    check_configured(shown)
    for name, options in shown.items():
        parameters = inspect.signature(type(load_policy(name))).parameters
        assert options == {option: parameter.default for option, parameter in parameters.items()}
    built_in = {"deadline", "fair", "mlfq", "priority", "shortest"}
    assert set(shown) == built_in


def test_whole_numbers_stand_for_fractions() -> None:
    policy = load_policy("priority", ageing_s=7)
    assert isinstance(policy, Priority)
    assert policy.ageing_s == 7
