"""Policies from a file of the user's: which axis each takes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext import systems
from vllm_ext.config import ConfigError, parse
from vllm_ext.systems.user_policies import load

FILE = """
from dataclasses import dataclass
from beside import LIMIT
from vllm_ext.contract import Admission, Budget, GatePolicy, Ordering, Rank

@dataclass(frozen=True, kw_only=True)
class Mine(Ordering):
    limit_s: float = LIMIT
    def rank(self, request, now):
        return Rank((request.num_prompt_tokens,))

@dataclass(frozen=True, kw_only=True)
class MyAdmission(Admission):
    def select(self, step, room):
        for candidate in step.waiting():
            if not room.fits(candidate):
                return
            room.take(candidate)

class Other(Ordering):
    pass

@dataclass(frozen=True, kw_only=True)
class MyGate(GatePolicy):
    def gate(self, step):
        raise NotImplementedError

class Nothing:
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("LIMIT = 7.0\n")
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def built(system: str, *named: str, **options: object) -> systems.Policies:
    return systems.build(parse({"system": system, "policies": list(named), **options}))


def test_policy_takes_its_axis_and_leaves_the_others(file: Path) -> None:
    row, ours = built("sarathi"), built("sarathi", f"{file}:Mine", ordering={"limit_s": 9.0})
    assert (type(ours.ordering).__name__, ours.budget) == ("Mine", row.budget)
    assert vars(ours.ordering) == {"limit_s": 9.0}
    assert vars(built("fcfs", f"{file}:Mine").ordering) == {"limit_s": 7.0}, "what lies beside the file was imported"


def test_admission_of_ones_own_keeps_the_gates_and_what_the_row_sets_of_them(file: Path) -> None:
    """past-future's oracle sets its gate's forecast; auto sets parameters of its selector, which go with that."""
    row, ours = (built("oracle-past-future", *named, allow_oracle=True) for named in ((), (f"{file}:MyAdmission",)))
    assert type(ours.admission).__name__ == "MyAdmission"
    assert ours.gates == row.gates
    assert type(built("auto", f"{file}:MyAdmission").admission).__name__ == "MyAdmission"


def test_gate_stands_beside_those_of_the_row(file: Path) -> None:
    assert [type(gate).__name__ for gate in built("past-future", f"{file}:MyGate").gates] == ["PeakMemory", "MyGate"]


def test_edited_file_is_another_class_and_an_unchanged_one_the_same(file: Path) -> None:
    first = load(f"{file}:Mine")
    assert load(f"{file}:Mine") is first
    file.write_text(f"{FILE}\nx = 1\n")
    assert load(f"{file}:Mine") is not first


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("mine.py", "FILE.py:CLASS"),
        ("mine:Mine", "FILE.py:CLASS"),
        ("none.py:Mine", "none.py"),
        ("mine.py:Missing", "Mine, MyAdmission, Other, MyGate"),
        ("mine.py:Nothing", "derived from Ordering"),
        ("broken.py:Mine", "SyntaxError"),
    ],
)
def test_wrong_file_or_class_is_named_with_what_is_allowed(
    file: Path, monkeypatch: pytest.MonkeyPatch, named: str, says: str
) -> None:
    monkeypatch.chdir(file.parent)
    Path("broken.py").write_text("class Mine(:\n")
    with pytest.raises(ConfigError, match=r"policies=") as refused:
        built("fcfs", named)
    assert named in str(refused.value)
    assert says in str(refused.value)


def test_two_policies_for_one_axis_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"one policy per axis; .*mine.py:Mine sets ordering as well"):
        built("fcfs", f"{file}:Mine", f"{file}:Other")
