"""Memory order, scopes and inline assembly of the Triton kernels stand in signals.py alone.

A flag at the scope of one GPU is never seen by its peers, and looks right in every test of one
process: the fewer places there are, the fewer there are to check. multicast.py has the assembly of
multimem, which has no other spelling. flash_attention_roles_steps.py converts numbers by assembly
and reads a constant again, both within one program: no flag, no scope.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "triton_kernels"
MAY = {"signals.py", "multicast.py"}
WITHIN_A_PROGRAM = {"flash_attention_roles_steps.py": {"inline_asm", "volatile"}}
ORDER = re.compile(r"\b(sem|scope)\s*=|inline_asm|debug_barrier|tl\.atomic_|volatile")


def _uses(text):
    return sorted({found[0] for found in ORDER.finditer(text)})


def test_no_other_file_spells_it():
    files = sorted(FOLDER.glob("*.py"))
    assert "signals.py" in {file.name for file in files}
    found = {file.name: set(_uses(file.read_text())) for file in files if file.name not in MAY}
    assert {name: uses for name, uses in found.items() if uses} == WITHIN_A_PROGRAM


def test_it_would_be_found():
    assert _uses('tl.atomic_xchg(flag, 1, sem="release", scope="gpu")')
    assert _uses("tl.debug_barrier()")
    assert not _uses("publish(flag, word)  # in scope, semantics")
